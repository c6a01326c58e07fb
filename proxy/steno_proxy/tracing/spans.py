"""Spans of what was seen: a trace per session, a span per turn. Pure. Names are those of OpenTelemetry's conventions for
generative AI; what these have no word for is `steno.…`.

Ids derive from the session and the turn, so that replicas need not agree on anything: any of them may have had a turn, and the
session's own span comes from whichever ended it. What is sent twice is the same span twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from steno.contracts.records import Session, Turn
from steno_proxy.tracing.content import short, shown
from steno_proxy.tracing.seen import Seen, SeenEnd, SeenRefusal, SeenTurn

OPERATIONS = {"completions": "text_completion", "gemini": "generate_content"}
"""Of a dialect, where it is not `chat`."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LAW = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("steno")


def resource() -> Resource:
    return Resource.create({"service.name": "steno"})


def span_of(seen: Seen, of: Resource, *, content: bool) -> ReadableSpan:
    """content: with what was said."""
    if isinstance(seen, SeenTurn):
        return _turn_span(seen, of, content)
    if isinstance(seen, SeenRefusal):
        return _refusal_span(seen, of)
    return _session_span(seen, of)


def linked(traceparent: str) -> SpanContext | None:
    """What a client's `traceparent` names; None: nothing, or nothing that can be read."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return SpanContext(int(found[1], 16), int(found[2], 16), True, TraceFlags(int(found[3], 16)))


def _session_span(seen: SeenEnd, of: Resource) -> ReadableSpan:
    session = seen.session
    counts = session.counts
    began = session.first_turn_at or session.created_at
    name = session.metadata.get("agent")
    agent = {"gen_ai.agent.name": name} if isinstance(name, str) and name else {}
    reward = {"steno.reward": session.reward} if session.reward is not None else {}
    return ReadableSpan(
        name=f"invoke_agent {name}" if agent else "invoke_agent",
        context=_context(session),
        resource=of,
        kind=SpanKind.INTERNAL,
        attributes={
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "steno",
            **_of_session(session), **agent, **reward,
            "gen_ai.usage.output_tokens": counts.completion_tokens,
            "steno.status": session.status,
            "steno.end_reason": session.end_reason or "",
            "steno.turns": counts.turns,
            "steno.forks": counts.forks,
            "steno.marks": session.marks,
        },
        status=Status(StatusCode.ERROR, session.end_reason) if session.status == "aborted" else Status(),
        start_time=_nanos(began),
        end_time=_nanos(max(session.ended_at or session.updated_at, began)),
        instrumentation_scope=_SCOPE,
    )  # fmt: skip


def _refusal_span(seen: SeenRefusal, of: Resource) -> ReadableSpan:
    at = _nanos(seen.at)
    attributes = _of_session(seen.session) | {"error.type": seen.code, "http.response.status_code": seen.status}
    return ReadableSpan(
        name=f"refused {seen.code}",
        context=_context(seen.session, f"refused {seen.at!r} {seen.code} {seen.message}"),
        parent=_context(seen.session),
        resource=of,
        kind=SpanKind.SERVER,
        attributes=attributes,
        events=[Event("steno.refusal", {"steno.message": seen.message}, timestamp=at)],
        status=Status(StatusCode.ERROR, seen.message),
        start_time=at,
        end_time=at,
        instrumentation_scope=_SCOPE,
    )


def _turn_span(seen: SeenTurn, of: Resource, content: bool) -> ReadableSpan:
    session, turn = seen.session, seen.turn
    began, times = turn.timings.queued, turn.timings
    ended = max(filter(None, (times.last_token, times.first_token, times.started, began)))
    joined = linked(seen.traceparent)
    operation = OPERATIONS.get(turn.dialect, "chat")
    failed = turn.error is not None
    return ReadableSpan(
        name=f"{operation} {turn.model or turn.served_model}",
        context=_context(session, turn.turn_id),
        parent=_context(session),
        resource=of,
        kind=SpanKind.CLIENT,
        attributes=_of_session(session) | {"gen_ai.operation.name": operation} | dict(_of_turn(turn, content)),
        events=list(_events(seen, ended)),
        links=[Link(joined, {"steno.link": "traceparent"})] if joined is not None else [],
        status=Status(StatusCode.ERROR, turn.error) if failed else Status(),
        start_time=_nanos(began),
        end_time=_nanos(ended),
        instrumentation_scope=_SCOPE,
    )


def _of_session(session: Session) -> dict[str, Any]:
    """session.id: trials of a group are shown together."""
    known: Mapping[str, str | None] = {
        "gen_ai.conversation.id": session.trial_id,
        "session.id": session.group_id or session.trial_id,
        "steno.run_id": session.run_id,
        "steno.group_id": session.group_id,
    }
    return {name: value for name, value in known.items() if value is not None}


def _of_turn(turn: Turn, content: bool) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.provider.name", "steno"
    yield "gen_ai.request.model", turn.model or turn.served_model
    yield "gen_ai.response.model", turn.served_model
    yield "gen_ai.response.id", turn.turn_id
    yield "gen_ai.response.finish_reasons", [turn.finish_reason]
    yield "gen_ai.usage.input_tokens", turn.prompt_tokens
    yield "gen_ai.usage.output_tokens", turn.completion_tokens
    if turn.cached_tokens:
        yield "gen_ai.usage.cache_read.input_tokens", turn.cached_tokens
    if turn.reasoning_tokens:
        yield "gen_ai.usage.reasoning.output_tokens", turn.reasoning_tokens
    for name in _LAW:
        if isinstance(value := turn.law.get(name), int | float):
            yield f"gen_ai.request.{name}", value
    if isinstance(stop := turn.law.get("stop"), list) and stop:
        yield "gen_ai.request.stop_sequences", [short(text) for text in stop]
    if turn.timings.first_token is not None:
        yield "gen_ai.response.time_to_first_chunk", max(0.0, turn.timings.first_token - turn.timings.queued)
    if turn.error is not None:
        yield "error.type", turn.error.partition(":")[0]
    yield "steno.dialect", turn.dialect
    yield "steno.worker_id", turn.worker_id
    yield "steno.attempt", turn.attempt
    yield "steno.versions", [span.version for span in turn.versions]
    for field in ("parent_id", "fork_reason", "retry_of", "delivered", "task_step"):
        if (found := getattr(turn, field)) is not None:
            yield f"steno.{field}", found if isinstance(found, int) else str(found)
    if content:
        yield "gen_ai.input.messages", shown(turn.messages)
        yield "gen_ai.output.messages", shown([{"role": "assistant"} | turn.reply], turn.finish_reason)


def _events(seen: SeenTurn, ended: float) -> Iterator[Event]:
    turn = seen.turn
    if turn.retry_of is not None:
        yield _event("steno.retry", turn.timings.queued, {"steno.retry_of": turn.retry_of})
    for move in seen.moves:
        said = {
            "steno.how": move.how,
            "error.type": move.error,
            "steno.tokens": move.tokens,
            "steno.worker_id": move.worker_id,
        }
        yield _event("steno.failover", move.at, said)
    for before, after in zip(turn.versions, turn.versions[1:], strict=False):
        said = {
            "steno.from": before.version,
            "steno.to": after.version,
            "steno.token": after.start,
            "steno.estimated": True,
        }
        yield _event("steno.update", _time_of(turn, after.start, ended), said)


def _time_of(turn: Turn, token: int, ended: float) -> float:
    """About when a token came: as if all came evenly."""
    first = turn.timings.first_token or turn.timings.queued
    return first + (ended - first) * token / max(turn.completion_tokens, 1)


def _event(name: str, at: float, attributes: Mapping[str, Any]) -> Event:
    return Event(name, attributes, timestamp=_nanos(at))


def _context(session: Session, what: str = "") -> SpanContext:
    """Of the session's own span, or of one below it. A trial id that is used again after its session was deleted is another
    trace."""
    life = f"{session.trial_id}\n{session.created_at!r}"
    trace = int.from_bytes(blake2b(life.encode(), digest_size=16).digest(), "big")
    span = int.from_bytes(blake2b(f"{life}\n{what}".encode(), digest_size=8).digest(), "big")
    return SpanContext(trace or 1, span or 1, False, _SAMPLED)


def _nanos(at: float) -> int:
    return round(at * 1e9)
