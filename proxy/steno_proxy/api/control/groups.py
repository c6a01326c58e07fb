"""Groups: the trials of one task, made together. Each trial gets its URLs and key, the group a harness key (I8).
The admin key opens all of it; a run's key makes and reads groups of its run, a harness key reads its group; both claim trials; a
viewer key reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response

from steno.contracts.errors import BadRequest, Conflict, Gone, NotFound
from steno.contracts.records import Group, SamplingPolicy, Session
from steno.contracts.rest import GroupSpec, GroupTrials, not_given
from steno.contracts.runs.claims import Claim, ClaimList, ClaimRequest
from steno.contracts.runs.leases import GroupList
from steno_proxy.api.common import (
    ERRORS,
    check_run,
    encoded,
    encoded_items,
    key_of_a_run,
    known_query,
    origin_of,
    reader,
    reading_cookies,
    services,
    trial,
)
from steno_proxy.auth.keys import key_of
from steno_proxy.sessions import law
from steno_proxy.store.claims import Claimed, TrialClaim

log = logging.getLogger(__name__)

T = TypeVar("T")
SLICE = 256
LISTED_AT_ONCE = 500
"""Groups of a list, made JSON in 1 to 11 ms. A run may have 100,000, which take 0.8 s (2026-11-23)."""
CLAIMED_AT_ONCE = 64
"""Trials of a claim that the store is asked for together: over Redis each takes two round trips."""
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
    sampling = sampling_of(spec)
    law.check(sampling)
    found = services(request)
    group_id = spec.group_id or uuid.uuid4().hex
    await found.capacity.check(lambda: found.store.group(group_id))
    if spec.fork_of is not None:
        await origin_of(request, spec.fork_of)
    origins = await _scored_anew(request, spec, group_id)
    now = found.store.clock()
    trial_ids = [f"{group_id}.{i}" for i in range(spec.size)]
    group = Group(
        group_id=group_id,
        run_id=spec.run_id,
        task=spec.task,
        withheld=spec.withheld if found.keys.enabled else {},  # else agents could read it
        size=spec.size,
        deadline_s=spec.deadline_s,
        purpose=spec.purpose,
        sampling=sampling,
        limits=spec.limits,
        fork_of=spec.fork_of,
        rescore_of=spec.rescore_of,
        trial_ids=trial_ids,
        created_at=await found.store.now(),
    )
    sessions = await _in_slices(
        Session(
            trial_id=trial_id,
            group_id=group_id,
            run_id=spec.run_id,
            created_at=now,
            updated_at=now,
            **(
                {"sampling": sampling, "limits": spec.limits, "fork_of": spec.fork_of}
                if spec.rescore_of is None
                else _of_origin(f"{spec.rescore_of}.{i}", origins)
            ),
        )
        for i, trial_id in enumerate(trial_ids)
    )
    recorded = await found.store.create_group(group, sessions)
    by_id = {session.trial_id: session for session in sessions}
    if recorded.created_at != group.created_at:
        # Made before: the sessions may have come a long way since, and have been deleted one by one.
        by_id = await _recorded_sessions(request, group_id)
    trials = await _in_slices(trial(request, by_id[trial_id]) for trial_id in recorded.trial_ids if trial_id in by_id)
    return encoded(request, GroupTrials(group=recorded, trials=trials, harness_key=found.keys.harness_key(group_id)))


async def _scored_anew(request: Request, spec: GroupSpec, group_id: str) -> dict[str, Session]:
    """The recorded sessions of the group that `spec` rescores, by trial id; {} if it rescores none, or if `group_id`
    exists already and the rescored group does not.

    Raises: BadRequest, Conflict, NotFound: that group does not exist, or can't be rescored like this."""
    if spec.rescore_of is None:
        return {}
    for name in ("fork_of", "deadline_s"):
        if getattr(spec, name) is not None:
            raise BadRequest(f"{name}: can't be given with rescore_of", field=name)
    store = services(request).store
    try:
        origin = await store.group(spec.rescore_of)
    except NotFound:
        with contextlib.suppress(NotFound):
            await store.group(group_id)  # made before: it needs its origin no more
            return {}
        raise NotFound(f"rescore_of: no group {spec.rescore_of}", field="rescore_of") from None
    check_run(request, origin.run_id)
    if origin.size != spec.size:
        raise BadRequest(
            f"size: got {spec.size}, must be {origin.size}, as many as group {spec.rescore_of} has", field="size"
        )
    if origin.purpose != spec.purpose:
        raise BadRequest(
            f"purpose: got {spec.purpose}, must be {origin.purpose}, as in {spec.rescore_of}", field="purpose"
        )
    sessions = await _recorded_sessions(request, spec.rescore_of)
    if running := [session.trial_id for session in sessions.values() if session.status == "open"]:
        raise Conflict(
            f"rescore_of: {len(running)} trials of group {spec.rescore_of} are still open, such as {running[0]}",
            field="rescore_of",
        )
    return sessions


def _of_origin(trial_id: str, origins: dict[str, Session]) -> dict[str, Any]:
    """What a session that scores this trial anew has of it, besides its turns."""
    origin = origins.get(trial_id)
    if origin is None:
        return {"rescore_of": trial_id}
    kept = {name: getattr(origin, name) for name in ("sampling", "fork_of", "marks", "metadata")}
    return {"rescore_of": trial_id, **kept}


async def _in_slices(made: Iterable[T]) -> list[T]:
    """All of them. Thousands are made in several turns of the event loop."""
    found: list[T] = []
    for each in made:
        found.append(each)
        if len(found) % SLICE == 0:
            await asyncio.sleep(0)
    return found


async def _recorded_sessions(request: Request, group_id: str) -> dict[str, Session]:
    """Raises: ArchiveUnreadable: some can't be read now."""
    store = services(request).store
    found: dict[str, Session] = {}
    cursor = None
    while True:
        page = await store.list_sessions(
            status=None, group_id=group_id, since=None, until=None, cursor=cursor, limit=1000
        )
        if (error := not_given(page.unreadable)) is not None:
            raise error
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
    found = GroupList(items=await services(request).store.runs.groups(run_id))
    return await encoded_items(request, found, LISTED_AT_ONCE)


async def _group_of_harness(request: Request, group_id: str) -> Group:
    """The group, for its own key, its run's or the admin's. As a dependency it is asked before the body is looked at."""
    found = services(request)
    key = key_of(request.scope["headers"])
    try:
        group = await found.store.group(group_id)
    except NotFound:
        found.keys.check_harness(key, group_id)
        raise
    found.keys.check_harness(key, group_id, group.run_id)
    return group


@router.get("/groups/{group_id}", response_model=Group, summary="The group's record")
async def read_group(request: Request, group_id: str) -> Response:
    found = services(request)
    key = key_of(request.scope["headers"])
    if found.keys.is_reader(key, reading_cookies(request)):
        return encoded(request, await found.store.group(group_id))
    return encoded(request, await _group_of_harness(request, group_id))


def _deleted(group: Group, trial_id: str, now: float) -> Session:
    """The session that a claim returns for a trial whose record is gone."""
    return Session(
        trial_id=trial_id,
        group_id=group.group_id,
        run_id=group.run_id,
        status="deleted",
        end_reason="deleted",
        created_at=group.created_at,
        updated_at=now,
    )


@router.post(
    "/groups/{group_id}/claims",
    response_model=ClaimList,
    summary="A launcher claims trials of the group, or renews its claims; a lost launcher's are taken over",
)
async def claim_trials(
    request: Request, group: Annotated[Group, Depends(_group_of_harness)], asked: ClaimRequest
) -> Response:
    found = services(request)
    if others := set(asked.trial_ids) - set(group.trial_ids):
        raise BadRequest(f"trial_ids: {min(others)} is no trial of group {group.group_id}", field="trial_ids")
    now = await found.store.now()
    # What is evaluated needs no trainer: a late reward is told of all the same.
    past_deadline = (
        group.purpose == "train" and group.deadline_s is not None and group.created_at + group.deadline_s <= now
    )

    async def claim(trial_id: str) -> Claim:
        try:
            session, claimed = await found.store.claim(trial_id, asked.launcher, asked.ttl_s, now=now, gone=asked.gone)
        except (Gone, NotFound):  # deleted: that is no reason to refuse the group's other trials
            session, claimed = _deleted(group, trial_id, now), Claimed(TrialClaim(), granted=False, taken_over=False)
        claim = claimed.claim
        if claimed.taken_over:
            log.warning("session %s: launcher %s takes it over (claim %d)", trial_id, asked.launcher, claim.epoch)
        return Claim(
            granted=claimed.granted, epoch=claim.epoch, launcher=claim.launcher or None,
            left_s=max(0.0, claim.expires_at - now), past_deadline=past_deadline, trial=trial(request, session),
        )  # fmt: skip

    items: list[Claim] = []
    for start in range(0, len(asked.trial_ids), CLAIMED_AT_ONCE):
        items += await asyncio.gather(*map(claim, asked.trial_ids[start : start + CLAIMED_AT_ONCE]))
    return encoded(request, ClaimList(items=items))
