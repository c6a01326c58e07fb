"""From a finished stream to its record: the `Turn` and the `IndexRow` that are committed together.

Pure but for reading the recording's tree. The record is built without validation, since every value was made here: pydantic's
checks would cost more than the rest of a turn.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from steno.contracts.chat import CanonicalRequest, Sampling
from steno.contracts.errors import StenoError
from steno.contracts.records import OPEN, ForkReason, IndexRow, Timings, Turn, WorkerSpan, tokenizer_key
from steno.contracts.wire.frames import Started
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.sessions import prompt_index
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.store.interface import RetryKey
from steno_proxy.tracing.seen import TurnMove
from steno_proxy.turns.continuation import Plan, fork_reason_now
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.workers.placement import Order
from steno_proxy.workers.stream import Stream

_CANCELLED = frozenset({"client_left", "session_closed", "budget_spent", "proxy_stopped"})
"""Codes of errors from outside the model: they end a turn as `cancelled`, any other error ends it as `error`."""


class TurnFacts(msgspec.Struct):
    """What is known of a turn besides what the worker said. Times in Unix seconds; None: that did not happen.

    changed: what the trial's sampling policy changed. answer_id: turn id of the first of n. retry_of: see `Turn`. request: the
    key by which its retries are found; None: this turn is not paired with retries. task_step: the step that the trial was at
    when this was asked. moves: to other workers.
    """

    asked: CanonicalRequest
    changed: dict[str, Any]
    queued: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    answer_id: str | None = None
    retry_of: str | None = None
    request: RetryKey | None = None
    task_step: str | None = None
    moves: list[TurnMove] = []


class SampledChoice(Protocol):
    """A completion as far as its record goes.

    index: of the choice; siblings after the first fork by that. closed: a block of the answer has been closed on its way to the
    client, so that it may keep what came before (I3).
    """

    index: int
    order: Order
    stream: Stream
    plan: Plan
    transcript: ChoiceTranscript
    facts: TurnFacts

    @property
    def closed(self) -> bool: ...


def turn_of(
    recording: Recording, choice: SampledChoice, error: StenoError | None, delivered: int, still_open: bool = False
) -> tuple[Turn, IndexRow]:
    """The record of a completion, and what recognition will need of it.

    Args: error: why it ended before the model did; None: it did not. delivered: tokens that the client has, or is about to be
        sent in one piece. still_open: it goes on.

    If a turn breaks after a block was closed, its client has the closed blocks, and will send them back. So the recorded reply
    has these alone, while the recorded ids are all that was sampled (I4).
    """
    stream, plan, transcript, facts = choice.stream, choice.plan, choice.transcript, choice.facts
    started = transcript.started
    assert started is not None
    finish = transcript.finish.reason if transcript.finish is not None and error is None else _end(error)
    if still_open:
        finish = OPEN
    partial = still_open or error is not None
    counted = transcript.is_counted
    reply = transcript.message(closed=partial and choice.closed)
    turn = Turn.model_construct(
        turn_id=transcript.turn_id,
        parent_id=plan.parent_id,
        fork_reason=_fork_reason(recording, plan, choice.index),
        index=-1,
        dialect=facts.asked.dialect,
        model=facts.asked.model,
        served_model=stream.card.name,
        worker_id=stream.worker_id,
        attempt=choice.order.attempt,
        workers=_workers(transcript, stream),
        answer_id=facts.answer_id,
        choice=choice.index,
        retry_of=facts.retry_of,
        policy=stream.card.policy,
        new_prompt_ids=started.new_ids,
        prompt_tokens=transcript.prompt_tokens,
        prompt_digest=started.prompt_digest,
        completion_ids=bytes(transcript.ids),
        upstream_tokens=(transcript.tokens or None) if transcript.text_only else None,
        sampling_logprobs=bytes(transcript.logprobs),
        versions=transcript.versions(),
        constrained=transcript.constrained(),
        mixed_kv=stream.mixed_kv,
        tokenizer=tokenizer_key(stream.card.tokenizer_digest).hex(),
        task_step=facts.task_step,
        finish_reason=finish,
        stop=transcript.finish.stop if transcript.finish is not None and not partial else "",
        partial=partial,
        error=f"{error.code}: {error.message}" if error is not None else None,
        delivered=delivered if counted and not still_open else None,
        asked=facts.asked.asked,
        law=_law(started.law),
        messages=plan.new_messages,
        reply=reply,
        call_ids=transcript.call_ids(),
        tools=plan.job.tools,
        options=options_of(plan, facts.changed, started.dropped, facts.asked.kept),
        thinking_kept=started.thinking_kept,
        reasoning_tokens=transcript.reasoning_tokens,
        cached_tokens=(transcript.finish.cached_tokens if transcript.finish is not None else 0)
        or started.cached_tokens,
        timings=Timings.model_construct(
            queued=facts.queued, started=facts.started, first_token=facts.first_token, last_token=facts.last_token
        ),
    )
    row = IndexRow(
        turn_id=turn.turn_id,
        parent=plan.parent,
        digests=_digests(plan, started, transcript, reply),
        tools=plan.tools,
        options=plan.options,
        finish=finish,
        partial=turn.partial,
        path_tokens=transcript.prompt_tokens + transcript.tokens,
        own_call_ids=transcript.own_call_ids(),
        completion_tokens=transcript.tokens if counted else None,
        tokenizer=tokenizer_key(stream.card.tokenizer_digest),
    )
    return turn, row


def _workers(transcript: ChoiceTranscript, stream: Stream) -> list[WorkerSpan]:
    """Who sampled what, where there were several."""
    if not transcript.workers:
        return []
    spans = [*transcript.workers, (stream.worker_id, transcript.workers[-1][2], transcript.tokens)]
    return [
        WorkerSpan.model_construct(worker_id=name, start=start, end=end) for name, start, end in spans if end > start
    ]


def _end(error: StenoError | None) -> str:
    return "cancelled" if error is not None and error.code in _CANCELLED else "error"


def _fork_reason(recording: Recording, plan: Plan, index: int) -> ForkReason | None:
    return ForkReason.SIBLING if index else fork_reason_now(recording, plan)


def _digests(plan: Plan, started: Started, transcript: ChoiceTranscript, reply: dict[str, Any]) -> bytes:
    if not plan.is_prompt:
        return plan.new_digests + message_digest(reply)
    if plan.options == prompt_index.IDS:
        prompt = plan.job.prompt_ids or b""
        return prompt_index.digests(prompt, prompt + bytes(transcript.ids))
    text = plan.job.prompt_text or ""
    return prompt_index.digests(text.encode(), (text + reply["content"]).encode())


def _law(law: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(law, str_keys=True)
    return found


def options_of(plan: Plan, changed: dict[str, Any], dropped: list[str], kept: dict[str, Any]) -> dict[str, Any]:
    """How the turn was served besides its sampling law: what differs from the defaults, what the policy changed, what an
    upstream could not take, how its history was recognised if not by what it says, and what the dialect keeps for those who ask
    for the answer again."""
    job = plan.job
    options: dict[str, Any] = {}
    if job.tool_choice != "auto":
        options["tool_choice"] = job.tool_choice
    if not job.parallel_tool_calls:
        options["parallel_tool_calls"] = False
    if job.response_format.type != "text":
        options["response_format"] = msgspec.to_builtins(job.response_format)
    if job.template_kwargs:
        options["template_kwargs"] = job.template_kwargs
    if changed:
        options["changed"] = changed
    if dropped:
        options["dropped"] = dropped
    if plan.echoed_as is not None:
        options["echoed_as"] = str(plan.echoed_as)
    if kept:
        options["kept"] = kept
    return options
