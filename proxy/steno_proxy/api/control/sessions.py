"""Sessions: register, list, read, watch, complete, delete. The admin key opens all of it; a run's key and a group's
harness key read and complete the sessions of their run or group; a viewer key reads; an agent's key opens nothing here (I8)."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from starlette.responses import StreamingResponse

from steno.contracts.errors import BadRequest, Conflict, Gone, StenoError
from steno.contracts.records import TRIAL_ID, Session
from steno.contracts.rest import (
    Completion,
    KeyRotation,
    SampleList,
    SessionPage,
    SessionSpec,
    TaskStep,
    Trial,
    TurnPage,
)
from steno_proxy.api.agent_http import NO_TRIAL_ID, valid_trial_id
from steno_proxy.api.common import (
    ERRORS,
    admin,
    encoded,
    encoded_items,
    harness_of_trial,
    known_query,
    origin_of,
    reader,
    services,
    trial,
)
from steno_proxy.sessions import law
from steno_proxy.sessions.readable import fault
from steno_proxy.sessions.samples import samples
from steno_proxy.store.borrowing import borrow_turns
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.views import check_cursor

log = logging.getLogger(__name__)

EVENT_KEEPALIVE_S = 15.0
"""Seconds of silence on an event stream before a comment; clients give up after much longer."""

TrialId = Annotated[str, Path(pattern=TRIAL_ID, description="as registered")]
router = APIRouter(tags=["sessions"], responses=ERRORS)
_admin = [Depends(admin), Depends(known_query)]
_harness = [Depends(harness_of_trial), Depends(known_query)]


async def _register(request: Request, trial_id: str, spec: SessionSpec) -> Response:
    if not valid_trial_id(trial_id):
        raise BadRequest(f"{trial_id[:128]!r} {NO_TRIAL_ID}", field="trial_id")
    law.check(spec.sampling)
    store = services(request).store
    now = store.clock()
    sampling = spec.sampling
    if spec.fork_of is not None:
        origin = await origin_of(request, spec.fork_of)
        sampling = spec.sampling if "sampling" in spec.model_fields_set else origin.sampling
    session = Session(
        trial_id=trial_id,
        run_id=spec.run_id,
        metadata=spec.metadata,
        sampling=sampling,
        limits=spec.limits,
        fork_of=spec.fork_of,
        created_at=now,
        updated_at=now,
    )
    await services(request).capacity.check(lambda: store.session(trial_id))
    recorded = await store.register(session)
    for name in ("run_id", "sampling", "limits", "fork_of"):  # what would silently not hold
        if name in spec.model_fields_set and getattr(spec, name) != getattr(recorded, name):
            raise Conflict(f"{name}: session {trial_id} is registered already, with another {name}", field=name)
    return encoded(request, trial(request, recorded))


@router.post(
    "/sessions",
    dependencies=_admin,
    response_model=Trial,
    summary="Register a trial (idempotent; other limits, sampling, run or fork: 409)",
)
async def register_session(request: Request, spec: SessionSpec) -> Response:
    return await _register(request, spec.trial_id or uuid.uuid4().hex, spec)


@router.post(
    "/sessions/{trial_id}",
    dependencies=_admin,
    response_model=Trial,
    summary="Register a trial by this id (idempotent; other limits, sampling, run or fork: 409)",
)
async def register_named_session(request: Request, trial_id: TrialId, spec: SessionSpec | None = None) -> Response:
    spec = spec or SessionSpec()
    if spec.trial_id is not None and spec.trial_id != trial_id:
        raise BadRequest("trial_id differs from the one in the path", field="trial_id")
    return await _register(request, trial_id, spec)


@router.get(
    "/sessions",
    dependencies=[Depends(reader), Depends(known_query)],
    response_model=SessionPage,
    summary="Sessions by creation time",
)
async def list_sessions(
    request: Request,
    status: Literal["open", "completed", "aborted", "deleted"] | None = None,
    group_id: Annotated[str | None, Query(max_length=128)] = None,
    since: Annotated[float | None, Query(allow_inf_nan=False, description="created at or after, Unix seconds")] = None,
    until: Annotated[float | None, Query(allow_inf_nan=False, description="created before, Unix seconds")] = None,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    run_id: Annotated[str | None, Query(max_length=128)] = None,
    order: Literal["oldest", "newest"] = "oldest",
) -> Response:
    page = await services(request).store.list_sessions(
        status=status, group_id=group_id, since=since, until=until, cursor=cursor, limit=limit,
        wanted=SessionFilter(run_id=run_id), newest_first=order == "newest",
    )  # fmt: skip
    return encoded(
        request, SessionPage(items=page.items, next_cursor=page.next_cursor, unreadable=list(page.unreadable))
    )


@router.get("/sessions/{trial_id}", dependencies=_harness, response_model=Session, summary="The session's record")
async def read_session(request: Request, trial_id: TrialId) -> Response:
    store = services(request).store
    session = await store.session(trial_id)
    session.notes = await store.notes(trial_id)
    return encoded(request, session)


@router.get(
    "/sessions/{trial_id}/turns", dependencies=_harness, response_model=TurnPage, summary="Its turns, in commit order"
)
async def read_turns(
    request: Request,
    trial_id: TrialId,
    start: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    store = services(request).store
    session = await store.session(trial_id)
    turns = await store.turns(trial_id, start=start, limit=limit)
    for turn in turns:
        turn.unreadable = None if turn.upstream_tokens else fault(turn, synthetic="synthetic" in session.marks)
    after = start + len(turns)
    more = bool(turns) and after < session.counts.turns
    return await encoded_items(request, TurnPage(items=turns, next_start=after if more else None))


@router.get(
    "/sessions/{trial_id}/samples",
    dependencies=_harness,
    response_model=SampleList,
    summary="What a trainer sees: one sample per leaf of the conversation tree",
)
async def read_samples(request: Request, trial_id: TrialId) -> Response:
    store = services(request).store
    session = await store.session(trial_id)
    turns = await store.turns(trial_id)
    return await encoded_items(request, samples(session, turns))


@router.get(
    "/sessions/{trial_id}/events",
    dependencies=_harness,
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    summary="Live events (SSE): those on record after `after`, then as they happen, until the session has ended",
)
async def watch_session(
    request: Request,
    trial_id: TrialId,
    after: Annotated[str | None, Query(max_length=128)] = None,
    last_event_id: Annotated[str | None, Header(max_length=128)] = None,
) -> Response:
    store = services(request).store
    await store.session(trial_id)
    cursor = last_event_id or after
    check_cursor(cursor)  # while there is still a status to say so with
    events = store.events(trial_id, after=cursor)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    stopping = services(request).stopping
    return StreamingResponse(_sse(events, stopping), media_type="text/event-stream", headers=headers)


async def _sse(events: AsyncIterator[tuple[str, dict[str, Any]]], stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Events as SSE, with comments in the silences. The next event is awaited across them, so that none is lost."""
    iterator = aiter(events)
    stop = asyncio.ensure_future(stopping.wait())
    waiting: asyncio.Future[Any] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(iterator))
            done, _ = await asyncio.wait(
                {waiting, stop}, timeout=EVENT_KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if stop in done:
                return
            if not done:
                yield b": keepalive\n\n"
                continue
            try:
                cursor, event = waiting.result()
            except StopAsyncIteration:
                return
            except Gone:
                return
            except StenoError as error:
                log.warning("an event stream ended: %s", error.message)
                return
            waiting = None
            yield b"id: %s\nevent: %s\ndata: %s\n\n" % (
                cursor.encode(), str(event.get("type", "message")).encode(), msgspec.json.encode(event, enc_hook=str)
            )  # fmt: skip
    finally:
        stop.cancel()
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})
        aclose = getattr(iterator, "aclose", None)
        if aclose is not None:
            await aclose()


@router.post(
    "/sessions/{trial_id}/complete",
    dependencies=_harness,
    response_model=Session,
    summary="Freeze the session, with its reward (idempotent; another reward is a conflict)",
)
async def complete_session(request: Request, trial_id: TrialId, outcome: Completion) -> Response:
    found = services(request)
    if outcome.status == "completed":
        session = await found.store.session(trial_id)
        if session.rescore_of is not None and session.status == "open":
            await borrow_turns(found.store, session, now=found.store.clock())
    session = await found.store.complete(
        trial_id,
        status=outcome.status,
        reward=outcome.reward,
        end_reason=outcome.end_reason,
        metrics=outcome.metrics,
        now=found.store.clock(),
        final=outcome.final,
        claim=outcome.claim,
    )
    running = found.recorder.abort(trial_id, Gone(f"the session has ended ({outcome.end_reason})"))
    if running:
        await found.recorder.settle(running)
        session = await found.store.session(trial_id)
    await found.store.settle(trial_id, now=found.store.clock())
    if found.recorder.traces is not None and session.rescore_of is None:
        found.recorder.traces.ended(session)
    log.info("session %s ended: %s (%s)", trial_id, session.status, session.end_reason)
    return encoded(request, session)


@router.post(
    "/sessions/{trial_id}/task-step",
    dependencies=_harness,
    response_model=Session,
    summary="Name the task step that new turns of the trial belong to from now on (idempotent; ended: 410)",
)
async def begin_task_step(request: Request, trial_id: TrialId, step: TaskStep) -> Response:
    store = services(request).store
    await store.begin_task_step(trial_id, step.name)
    return encoded(request, await store.session(trial_id))


@router.post(
    "/sessions/{trial_id}/rotate-key",
    dependencies=_admin,
    response_model=Trial,
    summary="Make the agent's next key; its earlier keys are no longer valid",
)
async def rotate_session_key(request: Request, trial_id: TrialId, wanted: KeyRotation | None = None) -> Response:
    found = services(request)
    generation = await found.store.rotate_key(trial_id, wanted.generation if wanted else None)
    if wanted is not None and wanted.generation is not None and generation != wanted.generation:
        raise Conflict(f"generation: the trial's key has generation {generation} already", field="generation")
    log.info("session %s has key generation %d", trial_id, generation)
    return encoded(request, trial(request, await found.store.session(trial_id)))


@router.delete(
    "/sessions/{trial_id}", dependencies=_admin, status_code=204, summary="Remove everything; later writes get 410"
)
async def delete_session(request: Request, trial_id: TrialId) -> Response:
    found = services(request)
    await _delete(found.store, trial_id, found.settings.tombstone_s)
    await found.recorder.settle(found.recorder.abort(trial_id, Gone("the session was deleted")))
    found.recorder.forget(trial_id)
    log.info("session %s deleted", trial_id)
    return Response(status_code=204)


async def _delete(store: SessionStore, trial_id: str, tombstone_s: float) -> None:
    await store.delete(trial_id, now=store.clock(), tombstone_s=tombstone_s)
