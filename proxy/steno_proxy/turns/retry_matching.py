"""Finds the earlier request that a marked retry repeats.

SDKs repeat a request whose answer they did not get, and mark it. Only a mark makes a retry: equal prompts are legitimate
siblings. What it repeats is looked for among the requests that run here and among the turns on record, which any replica sees:
the same conversation, tools, options, format, model and sampling asked for. Then

    it runs here                        the client joins it and gets its answer from the beginning (`joined.py`)
    its answer is whole, on record      it is given again, with the same ids; nothing is sampled (`replay.py`)
    it broke, or is open elsewhere      it is asked again, and the turns on record of it are superseded; so is a summary of the
                                        conversation that says nothing
    nothing of it is on record          it is asked again; what another replica records later is superseded (`store/retries.py`)

An answer that was gone on from has arrived, so it is no candidate. Among several, one that did not reach its client goes first,
then the newest. A request that was refused with nothing on record, or whose client left while it waited for a worker, is
remembered for its retry, at any replica: the retry is new. A request over the trial's rate limit is remembered by the process
that refused it (`rate_limit.py`). A request that no proxy saw (its connection was refused) is not remembered, and its retry may
get an identical sibling's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from steno.contracts.chat import CanonicalRequest, Job
from steno.contracts.records import Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.sessions import prompt_index
from steno_proxy.turns.continuation import Plan

MARKS = {b"x-stainless-retry-count": 1, b"x-envoy-attempt-count": 2}
"""Header -> from which number on it says "again". OpenAI's and Anthropic's SDKs and what is built on them (Claude Code) count
retries from 0; Envoy counts attempts from 1."""
WINDOW_S = 900.0
"""How long after its end a turn can be what a retry repeats. Seconds; SDKs wait up to 60 s between attempts, and a client may
have waited for the answer until its own timeout, mostly 600 s."""
MOST_TURNS = 256
"""How many turns with the same prompt are looked at, the newest first; an answer has at most 128 turns."""


def retries_so_far(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """How often the client says that it has sent this request before; 0: this is no retry."""
    for name, value in headers:
        least = MARKS.get(name)
        if least is not None and len(value) < 10 and value.isdigit() and int(value) >= least:
            return int(value) - least + 1
    return 0


@dataclass(slots=True)
class RequestIdentity:
    """What a retry has in common with the request that it repeats: its place (`plan`), and what it asks (`asked`)."""

    asked: CanonicalRequest
    plan: Plan

    def is_of(self, turn: Turn) -> bool:
        """Whether the turn, which was asked the same messages, answers this request."""
        return (
            (turn.dialect, turn.model) == (self.asked.dialect, self.asked.model)
            and turn.asked == self.asked.asked
            and (turn.answer_id is not None) == (self.asked.n > 1)
            and turn.choice < self.asked.n
            and _served_of(turn.options) == _served(self.plan.job)
        )

    def key(self, trial_id: str) -> bytes:
        """16 bytes that are equal for equal requests of a trial."""
        plan, asked = self.plan, self.asked
        what = [
            trial_id, asked.dialect, asked.model, asked.n, plan.tools, plan.options, plan.digests, plan.job.prompt_ids,
            plan.job.prompt_text, plan.job.top_logprobs, msgspec.json.encode([asked.asked, _served(plan.job)], order="sorted"),
        ]  # fmt: skip
        if asked.returns_ids:
            what.append("ids")  # only then, so that replicas of older releases find what they know under the same key
        return blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()


def _served(job: Job) -> tuple[Any, ...]:
    return job.tool_choice, job.parallel_tool_calls, msgspec.to_builtins(job.response_format)


def _served_of(options: dict[str, Any]) -> tuple[Any, ...]:
    """As `_served`, from the options of a turn on record, which leave defaults out (`turn_record.py`)."""
    return (
        options.get("tool_choice", "auto"),
        options.get("parallel_tool_calls", True),
        options.get("response_format", {}),
    )


class RecordedAnswer(NamedTuple):
    """What is on record of the request that a retry repeats. turns: by choice. whole: they can be given again."""

    turns: dict[int, Turn]
    whole: bool


@dataclass(slots=True)
class _Answer:
    """The turns that answer one request, by choice."""

    turns: dict[int, Turn] = field(default_factory=dict)
    arrived: bool = False

    def whole(self, n: int) -> bool:
        return len(self.turns) == n and not any(turn.partial for turn in self.turns.values())

    def left(self, n: int) -> bool:
        """Whether all of it left for its client."""
        return self.whole(n) and all((turn.delivered or 0) >= turn.completion_tokens for turn in self.turns.values())


async def on_record(
    recorder: Recorder, recording: Recording, sought: RequestIdentity, now: float
) -> RecordedAnswer | None:
    """The turns that a retry repeats; None: there are none.

    Log-probabilities that were asked for need the texts of tokens, which nothing here knows (I6): such an answer is never whole.
    Nor is a summary that says nothing: its client was told of a failure, and would be again.
    Raises: StoreUnavailable, Gone.
    """
    tree, n = recording.tree, sought.asked.n
    answers: dict[str, _Answer] = {}
    for number in islice(_same_prompt(recording, sought.plan), MOST_TURNS):
        turns = await recorder.store.turns(recording.trial_id, start=number, limit=1)
        for turn in turns:
            if turn.turn_id == tree.ids[number] and sought.is_of(turn):
                answer = answers.setdefault(turn.answer_id or turn.turn_id, _Answer())
                answer.turns[turn.choice] = turn
                over = turn.superseded_by is not None or _ended_at(turn) < now - WINDOW_S
                answer.arrived = answer.arrived or over or tree.gone_on(number)
    found = [answer for answer in answers.values() if not answer.arrived]
    if not found:
        return None
    best = next((answer for answer in found if not answer.left(n)), found[0])
    whole = best.whole(n) and sought.plan.job.top_logprobs is None
    for turn in best.turns.values():
        whole = whole and not (sought.asked.compacts and not turn.reply["content"].strip())
        whole = whole and not await recorder.store.hidden(recording.trial_id, turn.turn_id)
    return RecordedAnswer(best.turns, whole)


def _same_prompt(recording: Recording, plan: Plan) -> Iterable[int]:
    """Numbers of the turns that were asked these messages in this place, and do not run here; newest first."""
    tree = recording.tree
    if plan.is_prompt:
        prompt = plan.job.prompt_ids if plan.job.prompt_ids is not None else (plan.job.prompt_text or "").encode()
        asked = [prompt_index.prompt_digest(prompt)]
        numbers = tree.turns_asked(asked, plan.tools, plan.options, after=plan.parent)
        if plan.parent >= 0:  # a worker that could not continue made a root of it
            numbers = sorted([*numbers, *tree.turns_asked(asked, plan.tools, plan.options)], reverse=True)
    else:
        numbers = tree.turns_asked(plan.digests, plan.tools, plan.options)
    running = set(recording.open_here.values())
    return (n for n in numbers if n not in running and tree.parents[n] in (plan.parent, -1))


def _ended_at(turn: Turn) -> float:
    """Unix seconds, about: the last that is known of it."""
    timings = turn.timings
    return timings.last_token or timings.started or timings.queued
