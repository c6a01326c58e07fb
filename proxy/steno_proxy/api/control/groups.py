"""Groups: the trials of one task, made together. Each trial gets its URLs and key, the group a harness key (I8).
The admin key opens all of it; a run's key makes and reads groups of its run."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response

from steno.contracts.errors import NotFound
from steno.contracts.leases import GroupList
from steno.contracts.records import Group, SamplingPolicy, Session
from steno.contracts.rest import GroupSpec, GroupTrials
from steno_proxy.api.common import (
    ERRORS,
    check_run,
    encoded,
    key_of_a_run,
    known_query,
    origin_of,
    reader,
    reading_cookie,
    services,
    trial,
)
from steno_proxy.auth.keys import key_of
from steno_proxy.sessions import law

T = TypeVar("T")
SLICE = 256
router = APIRouter(tags=["groups"], responses=ERRORS)


def sampling_of(spec: GroupSpec) -> SamplingPolicy:
    """The trials' sampling policy, `neutralise` resolved: training trials are plain unless told otherwise (I1)."""
    if spec.sampling.neutralise is not None:
        return spec.sampling
    return spec.sampling.model_copy(update={"neutralise": spec.purpose == "train"})


@router.post(
    "/groups",
    dependencies=[Depends(key_of_a_run), Depends(known_query)],
    response_model=GroupTrials,
    summary="Make a group and its trials (idempotent by group_id; another group of that id is a conflict)",
)
async def create_group(request: Request, spec: GroupSpec) -> Response:
    check_run(request, spec.run_id)
    law.check(spec.sampling)
    found = services(request)
    group_id = spec.group_id or uuid.uuid4().hex
    await found.capacity.check(lambda: found.store.group(group_id))
    if spec.fork_of is not None:
        origin = await origin_of(request, spec.fork_of)
        check_run(request, origin.run_id)
    now = time.time()
    sampling = sampling_of(spec)
    trial_ids = [f"{group_id}.{i}" for i in range(spec.size)]
    group = Group(
        group_id=group_id,
        run_id=spec.run_id,
        task=spec.task,
        size=spec.size,
        deadline_s=spec.deadline_s,
        purpose=spec.purpose,
        sampling=sampling,
        limits=spec.limits,
        fork_of=spec.fork_of,
        trial_ids=trial_ids,
        created_at=await found.store.now(),
    )
    sessions = await _in_slices(
        Session(
            trial_id=trial_id,
            group_id=group_id,
            run_id=spec.run_id,
            sampling=sampling,
            limits=spec.limits,
            fork_of=spec.fork_of,
            created_at=now,
            updated_at=now,
        )
        for trial_id in trial_ids
    )
    recorded = await found.store.create_group(group, sessions)
    by_id = {session.trial_id: session for session in sessions}
    if recorded.created_at != group.created_at:
        # Made before: the sessions may have come a long way since, and have been deleted one by one.
        by_id = await _recorded_sessions(request, group_id)
    trials = await _in_slices(trial(request, by_id[trial_id]) for trial_id in recorded.trial_ids if trial_id in by_id)
    return encoded(request, GroupTrials(group=recorded, trials=trials, harness_key=found.keys.harness_key(group_id)))


async def _in_slices(made: Iterable[T]) -> list[T]:
    """All of them. Thousands are made in several turns of the event loop."""
    found: list[T] = []
    for each in made:
        found.append(each)
        if len(found) % SLICE == 0:
            await asyncio.sleep(0)
    return found


async def _recorded_sessions(request: Request, group_id: str) -> dict[str, Session]:
    store = services(request).store
    found: dict[str, Session] = {}
    cursor = None
    while True:
        page = await store.list_sessions(
            status=None, group_id=group_id, since=None, until=None, cursor=cursor, limit=1000
        )
        found |= {session.trial_id: session for session in page.items}
        if (cursor := page.next_cursor) is None:
            return found


@router.get(
    "/groups",
    dependencies=[Depends(reader), Depends(known_query)],
    response_model=GroupList,
    summary="A run's groups and where they are, newest first, without their records",
)
async def list_groups(
    request: Request,
    run_id: Annotated[str | None, Query(max_length=128, description="unset: groups without a run")] = None,
) -> Response:
    return encoded(request, GroupList(items=await services(request).store.runs.groups(run_id)))


@router.get("/groups/{group_id}", response_model=Group, summary="The group's record")
async def read_group(request: Request, group_id: str) -> Response:
    found = services(request)
    key = key_of(request.scope["headers"])
    if found.keys.is_reader(key, reading_cookie(request)):
        return encoded(request, await found.store.group(group_id))
    try:
        group = await found.store.group(group_id)
    except NotFound:
        found.keys.check_harness(key, group_id)
        raise
    found.keys.check_harness(key, group_id, group.run_id)
    return encoded(request, group)
