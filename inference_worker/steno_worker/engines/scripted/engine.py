"""The scripted engine: a function writes the replies, everything else is real.

The message becomes tokens in the model's own template and streams through decoder, parser and relay like sampled ones. No
weights and no log-probabilities, and nothing here needs torch (transformers loads it by itself where it is installed): the card
says `synthetic`, and what it records is never leased.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import msgspec

from steno.contracts.chat import Job, Message, Sampling
from steno.contracts.errors import ConfigError, EngineFailed, WeightsRefused
from steno.contracts.records import bytes_to_ids
from steno.contracts.wire.frames import Generate, ModelCard, StreamEvent
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.chat.hf import HfChatFormat
from steno_worker.chat.interfaces import ChatFormat
from steno_worker.engines.options import engine_options, model_directory
from steno_worker.engines.scripted.script import Reply, ScriptFunction, request_of
from steno_worker.interfaces import StagedUpdate, TokenStep, TokenTally

OPTIONS = {
    "pace_s": (0.0, "seconds between tokens, where the script does not say; 0: as fast as they can be sent"),
}
"""Engine arguments: name -> (default, meaning)."""
CONTEXT_TOKENS = 131072
"""No model stands behind it: long enough for the longest prompts that agents send."""
TICK_S = 0.005
"""Streams wake together on multiples of this, as an engine's steps would wake them: 512 streams, one timer."""
BURST_TOKENS = 32
"""Without a pace: tokens per step, so that other streams get their turn."""
CACHED_RENDERS = 4096
_STAND_IN: Message = {"role": "user", "content": "."}
_request: contextvars.ContextVar[Generate] = contextvars.ContextVar("steno_scripted_request")
"""The request that `sample` serves: scripts are told its trial, and the ids that are already sampled."""


class ScriptedSettings(Protocol):
    """What `build` reads of the worker's settings."""

    model: Any
    script: str | None
    policy: str
    context_tokens: int | None
    engine_args: Any


def build(settings: ScriptedSettings) -> ScriptedEngine:
    """Raises: ConfigError naming the setting: no script, a broken one, no tokenizer or template, unknown argument."""
    options = engine_options(settings.engine_args, {name: default for name, (default, _) in OPTIONS.items()})
    if not settings.script:
        raise ConfigError("script: the scripted engine needs --script FILE.py:function", field="script")
    script = ScriptFunction(settings.script)
    context = settings.context_tokens or CONTEXT_TOKENS
    chat = HfChatFormat.load(model_directory(settings.model, weights=False), context_tokens=context)
    tokens = ScriptedTokens(script, chat, context_tokens=context, policy=settings.policy, **options)
    return ScriptedEngine(tokens, chat)


class ScriptedEngine(ChatEngine):
    """An `Engine` whose script knows the trial."""

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        _request.set(request)
        async with aclosing(super().generate(request)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event


class ScriptedTokens:
    """A `TokenEngine`: the ids of what a script says, at its pace."""

    def __init__(
        self,
        script: ScriptFunction,
        chat: ChatFormat,
        *,
        context_tokens: int | None = None,
        name: str = "scripted",
        policy: str = "default",
        pace_s: float = 0.0,
    ) -> None:
        if pace_s < 0:
            raise ConfigError(f"engine_args: pace_s: got {pace_s}, must be at least 0")
        self.tally = TokenTally()
        self._script = script
        self._renderer = ReplyRenderer(chat)
        self._stop_ids = chat.stop_ids
        self._ticker = Ticker(TICK_S)
        self._pace_s = pace_s
        self._running = 0
        self._card = ModelCard(
            name=name,
            context_tokens=context_tokens or CONTEXT_TOKENS,
            policy=policy,
            synthetic=True,
            tokenizer_digest=chat.digest,
            capabilities=["tools", "reasoning", "cancel"],
            vocabulary_size=chat.vocab_size,
        )

    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> None:
        """Nothing to load: the tokenizer is in the chat format."""

    async def stop(self) -> None:
        self._ticker.close()

    def load(self) -> tuple[int, int, float]:
        return self._running, 0, 0.0

    def checkpoint(self) -> Path | None:
        return None

    async def load_weights(self, update: StagedUpdate) -> float:
        """Takes the version's name, not its weights: tokens from here on have it."""
        self._card = msgspec.structs.replace(self._card, policy_version=update.version)
        return 0.0

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises: WeightsRefused: nothing here has probabilities."""
        raise WeightsRefused("probe: the scripted engine has no log-probabilities", field="probe")

    def constrains(self, job: Job) -> bool:
        return False

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        """Refuses nothing."""

    async def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        self._running += 1
        try:
            began = asyncio.get_running_loop().time()
            turn = sum(message["role"] == "assistant" for message in job.messages)
            request = _request.get(None)
            reply = await self._script(
                request_of(job, trial_id=request.trial_id if request is not None else "", turn=turn)
            )
            before = bytes_to_ids(request.sampled_ids).tolist() if request is not None else []
            ids, finish = self._reply_ids(reply, law, job, len(before))
            if ids[: len(before)] != before:
                raise EngineFailed(
                    f"script {self._script.where}: it gave a different reply than before its worker was lost"
                )
            ids = ids[len(before) :]
            pace_s = self._pace_s if reply.pace_s is None else reply.pace_s
            sent = 0
            async for due in self._ticker.paced(len(ids), began + (0.0 if before else reply.delay_s), pace_s):
                last = due == len(ids)
                self.tally.sampled += due - sent
                yield TokenStep(ids[sent:due], None, self._card.policy_version, finish=finish if last else None)
                sent = due
            if finish is None:
                raise EngineFailed(f"script {self._script.where}: failed after {sent} tokens, as the script asked")
        finally:
            self._running -= 1

    def _reply_ids(self, reply: Reply, law: Sampling, job: Job, before: int) -> tuple[list[int], Any]:
        """(ids, "stop" | "length" | None: the engine fails after them). The law is that of what follows the first `before`."""
        if reply.token_ids is not None:
            ids = list(reply.token_ids)
            if not ids or ids[-1] not in self._stop_ids:
                ids.append(min(self._stop_ids))
        else:
            ids = self._renderer.render(reply.message, job)
        if reply.fail_after_tokens is not None and reply.fail_after_tokens < len(ids):
            return ids[: reply.fail_after_tokens], None
        most = None if law.max_tokens is None else law.max_tokens + before
        limits = [limit for limit in (most, reply.length_after_tokens) if limit is not None]
        if limits and min(limits) < len(ids):
            return ids[: max(1, min(limits))], "length"
        return ids, "stop"


class ReplyRenderer:
    """An assistant message -> the ids that a model would have sampled to say it, its stop id included.

    Rendered after a stand-in for the conversation, not after all of it: what a template writes for the last message does not
    depend on the ones before, and a turn's cost must not grow with its history (I5). The newest renders are kept.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._renders: OrderedDict[bytes, list[int]] = OrderedDict()

    def render(self, message: Message, job: Job) -> list[int]:
        """Raises: BadRequest when the template refuses the message; EngineFailed when it leaves nothing of it."""
        plain = not job.messages
        key = msgspec.msgpack.encode((message, job.template_kwargs, plain))
        ids = self._renders.get(key)
        if ids is None:
            ids = self._renders[key] = (
                [*self._chat.encode(message["content"]), min(self._chat.stop_ids)]
                if plain
                else self._after_header(message, job.template_kwargs)
            )
            if len(self._renders) > CACHED_RENDERS:
                self._renders.popitem(last=False)
        return ids

    def _after_header(self, message: Message, options: dict[str, Any]) -> list[int]:
        prompt = self._chat.render([_STAND_IN], [], options)
        whole = self._chat.render([_STAND_IN, message], [], options)
        start = _common_prefix(prompt, whole)
        if start < len(prompt) and "reasoning_content" in message:
            # The prompt has settled the thinking already (it is off): what is said can't have any.
            return self._after_header({k: v for k, v in message.items() if k != "reasoning_content"}, options)
        said = whole[start:]
        end = next((index for index, token in enumerate(said) if token in self._chat.stop_ids), None)
        if end is not None:
            said = said[: end + 1]
        else:  # the stop ids are the headers of other roles (GLM): cut the generation prompt off, and stop
            tail = _common_prefix(prompt[::-1], said[::-1])
            said = [*said[: len(said) - tail], min(self._chat.stop_ids)]
        opened = self._text(prompt[start:])
        if "<think>" in opened and "</think>" not in opened:
            said = [*self._chat.encode("\n</think>\n\n"), *said]
        return said

    def _text(self, ids: list[int]) -> str:
        return self._chat.decoder().feed(ids, final=True) if ids else ""


def _common_prefix(left: list[int], right: list[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


class Ticker:
    """One timer per tick for all streams, however many wait for it."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    async def paced(self, count: int, start: float, pace_s: float) -> AsyncIterator[int]:
        """How many of `count` tokens are due, each time more are: the first at loop time `start`, then one per pace_s.

        A consumer that comes late gets several at once. Ends when all are due.
        """
        loop = asyncio.get_running_loop()
        due = 0
        while due < count:
            when = start + due * pace_s
            if when > loop.time():
                await self._until(when)
            elif due and not pace_s:
                await asyncio.sleep(0)
            if pace_s:
                due = min(count, max(due + 1, 1 + math.floor((loop.time() - start) / pace_s)))
            else:
                due = min(count, due + BURST_TOKENS)
            yield due

    async def _until(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        tick = math.ceil(when / self._tick_s)
        future = loop.create_future()
        waiting = self._waiting.get(tick)
        if waiting is None:
            self._waiting[tick] = [future]
            self._timers[tick] = loop.call_at(tick * self._tick_s, self._fire, tick)
        else:
            waiting.append(future)
        await future

    def _fire(self, tick: int) -> None:
        del self._timers[tick]
        for future in self._waiting.pop(tick):
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Cancel whoever still waits."""
        for timer in self._timers.values():
            timer.cancel()
        for waiting in self._waiting.values():
            for future in waiting:
                future.cancel()
        self._timers.clear()
        self._waiting.clear()
