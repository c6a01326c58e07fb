"""An engine that says what a test tells it, token by token, and remembers what it was asked. Ids and log-probabilities are made
up but exact: every completion's ids are its characters' code points, each drawn at the log-probability that `drawn` says."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from steno.contracts.chat import Job, TokenLogprob, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import Turn, bytes_to_floats, bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Generate, ModelCard, Started, StreamEvent
from steno_worker.interfaces import TokenTally

STOP_ID = 2


def drawn(trial_id: str, start: int, count: int) -> list[float]:
    """Log-probabilities of a trial's tokens from place `start` of their conversation, its prompt included. No two neighbours have
    the same, nor do the same places of most trials; each is a float32 to the bit."""
    first = zlib.crc32(trial_id.encode())
    return [-0.25 - (first + 37 * place) % 256 / 256 for place in range(start, start + count)]


def check_drawn(trial_id: str, turns: Iterable[Turn]) -> None:
    """I1: each recorded token of a parrot has the log-probability that it was drawn at, whoever drew it."""
    for turn in turns:
        if turn.sampling_logprobs:
            right = drawn(trial_id, turn.prompt_tokens, len(turn.completion_ids) // 4)
            assert bytes_to_floats(turn.sampling_logprobs).tolist() == right, f"turn {turn.index} of {trial_id}"


@dataclass
class Say:
    """One completion. `text` is sampled a character a token; `calls` as one token each; then a stop id.

    gates: each is awaited before the token of its number is sampled (0: the first). fail_after: the engine fails after so many
    tokens. refuse: raised before any token. refused: why the prefix ids are not used, as `Started` says it.
    finish: "" derives it: `length` at `max_tokens`, `tool_calls` with calls, else `stop`. lie: added to `completion_tokens`.
    versions: of each token.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # (own id, name, arguments)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    fail_after: int | None = None
    refuse: Exception | None = None
    finish: str = ""
    lie: int = 0
    no_logprobs: bool = False
    versions: Callable[[int], str] = lambda i: "base/0"
    refused: str = ""
    stop: str = ""  # the stop string that ends it, if one does


class ParrotEngine:
    """An `Engine`. `script` maps a request to what is said; `requests` are those that came, in order. What another parrot began
    (I9) it goes on with, after so many tokens of what it is told to say; its card must have TAKEOVER for that."""

    def __init__(self, script: Callable[[Generate], Say] | None = None, **card: Any) -> None:
        self.tally = TokenTally()
        self.script = script or (lambda request: Say("hello"))
        self.requests: list[Generate] = []
        self.cancelled: list[str] = []
        self._card = ModelCard(**{"name": "parrot", "context_tokens": 10_000_000} | card)

    def cards(self) -> list[ModelCard]:
        return [self._card]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def load(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    async def count(self, job: Job) -> int:
        return len(self.prompt(Generate(0, "", 0, "", job)))

    def prompt(self, request: Generate) -> list[int]:
        """New ids: those of what the prefix does not stand for."""
        job = request.job
        if request.sampled_ids:
            return []
        if job.prompt_ids is not None:
            return bytes_to_ids(job.prompt_ids)[len(request.prefix_ids) // 4 :].tolist()
        if job.prompt_text is not None:
            return [ord(letter) for letter in job.prompt_text]
        new = job.messages[request.prefix_messages :]
        return [1, *(ord(letter) for message in new for letter in f"{message['role']}:{message['content']}")]

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        say, job, ended = self.script(request), request.job, False
        try:
            if say.refuse is not None:
                raise say.refuse
            prefix = b"" if say.refused else request.prefix_ids
            if say.refused:
                request = Generate(request.stream, request.turn_id, 0, request.trial_id, job)
            new = ids_to_bytes(self.prompt(request))
            whole = prefix + new
            digest = hashlib.blake2b(whole, digest_size=16).digest()
            yield Started(
                request.stream, len(prefix) // 4, new, len(whole) // 4, digest, job.sampling, refused=say.refused
            )
            steps: list[dict[str, Any]] = [{"reasoning": letter} for letter in say.reasoning]
            steps += [{"content": letter} for letter in say.text]
            steps += [
                {"tool_calls": [ToolCallPiece(i, arguments, own, name)]}
                for i, (own, name, arguments) in enumerate(say.calls)
            ]
            steps.append({})
            limit = job.sampling.max_tokens or len(steps)
            begun = len(request.sampled_ids) // 4
            for i, step in enumerate(steps[:limit]):
                if i < begun:
                    continue
                if i in say.gates:
                    await say.gates[i].wait()
                if say.fail_after == i:
                    raise EngineFailed("the engine has died")
                text = step.get("content") or step.get("reasoning") or ""
                ids = [ord(text) if text else STOP_ID]
                [logprob] = drawn(request.trial_id, len(whole) // 4 + i, 1)
                tokens = []
                if job.top_logprobs is not None:
                    tops = [(text, text.encode(), logprob)] * job.top_logprobs
                    tokens = [TokenLogprob(text, text.encode(), logprob, tops)]
                logprobs = b"" if say.no_logprobs else floats_to_bytes([logprob])
                yield Delta(request.stream, ids_to_bytes(ids), logprobs, say.versions(i), tokens=tokens, **step)
            reason = say.finish or ("length" if limit < len(steps) else "tool_calls" if say.calls else "stop")
            ended = True  # the worker reads no further than a Finish
            yield Finish(request.stream, reason, min(limit, len(steps)) - begun + say.lie, say.stop)  # type: ignore[arg-type]
        finally:
            if not ended:
                self.cancelled.append(request.turn_id)
