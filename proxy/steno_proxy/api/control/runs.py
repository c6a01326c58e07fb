"""Runs: which there are, how far one is, which trainer has it, and the key that its rollouts need. The admin key opens all of
it; a run's key reads its own run, and says that its rollouts are over (I8)."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from steno.contracts.rest import RunKey
from steno.contracts.runs.leases import RolloutsOver, RunList, RunSummary, RunView, TakeOver, Tenure, TrainerHeartbeat
from steno_proxy.api.common import (
    ERRORS,
    admin,
    check_run,
    encoded,
    known_query,
    reader,
    reading_cookies,
    services,
)
from steno_proxy.auth.keys import key_of

log = logging.getLogger(__name__)

RunId = Annotated[str, Path(max_length=128)]
VIEWED_AT_ONCE = 100
"""Runs of a list whose states are read together: over Redis in few round trips, in memory in 2 ms. 1,000 are JSON in 6 ms."""
router = APIRouter(tags=["runs"], responses=ERRORS)
of_admin = [Depends(admin), Depends(known_query)]


async def _key_of_run(request: Request, run_id: RunId) -> None:
    check_run(request, run_id)


async def _reads_run(request: Request, run_id: RunId) -> None:
    found = services(request).keys
    if not found.is_reader(key_of(request.scope["headers"]), reading_cookies(request)):
        check_run(request, run_id)


read_by_run = [Depends(_reads_run), Depends(known_query)]
of_run = [Depends(_key_of_run), Depends(known_query)]
"""The key comes first: who has none learns nothing of what a call takes."""


@router.post(
    "/runs/{run_id:path}/trainer",
    dependencies=of_admin,
    response_model=Tenure,
    summary="Register as the run's trainer: the trainer before is superseded (409), and its leased groups are served again at "
    "once. If it was heard of in the last 15 s, 409 trainer_alive with retry-after, unless `take_over`",
)
async def take_over_run(request: Request, run_id: RunId, body: TakeOver) -> Response:
    tenure = await services(request).store.runs.take_over(run_id, body.trainer, force=body.take_over)
    log.info("run %s: its trainer is %s (epoch %d)", run_id, tenure.trainer, tenure.epoch)
    return encoded(request, tenure)


@router.post(
    "/runs/{run_id:path}/trainer/heartbeat",
    dependencies=of_admin,
    response_model=Tenure,
    summary="Heartbeat of a registered trainer, or its end; 409 superseded: another trainer has the run, and this one must end",
)
async def send_heartbeat(request: Request, run_id: RunId, body: TrainerHeartbeat) -> Response:
    await services(request).store.runs.heartbeat(run_id, body.trainer, body.epoch, leaving=body.leaving)
    return encoded(request, Tenure(run_id=run_id, trainer=body.trainer, epoch=body.epoch))


@router.post(
    "/runs/{run_id:path}/key",
    dependencies=of_admin,
    response_model=RunKey,
    summary="The run's key: reads it, makes its groups, plays and completes its trials, nothing else; the same each time",
)
async def key_of_run(request: Request, run_id: RunId) -> Response:
    return encoded(request, RunKey(run_id=run_id, key=services(request).keys.run_key(run_id)))


@router.get(
    "/runs",
    dependencies=[Depends(reader), Depends(known_query)],
    response_model=RunList,
    summary="Runs that have groups, the one with the newest group first",
)
async def list_runs(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> Response:
    runs, pace = services(request).store.runs, services(request).pace
    newest, found = await runs.newest(limit), []
    for start in range(0, len(newest), VIEWED_AT_ONCE):
        some = newest[start : start + VIEWED_AT_ONCE]
        await pace.turn()
        views = await asyncio.gather(*(runs.view(run_id, ledger=False) for run_id, _ in some))
        found += [
            RunSummary(run_id=run_id, last_group_at=made_at, groups=view.groups, eval_groups=view.eval_groups)
            for (run_id, made_at), view in zip(some, views, strict=True)
        ]
    await pace.turn()
    return encoded(request, RunList(items=found))


@router.post(
    "/runs/{run_id:path}/rollouts",
    dependencies=of_run,
    response_model=RolloutsOver,
    summary="The launcher says that no more training groups come, so that the trainer need not wait for them; a group that is "
    "registered afterwards takes this back",
)
async def rollouts(request: Request, run_id: RunId, body: RolloutsOver) -> Response:
    await services(request).store.runs.set_rollouts_over(run_id, body.over)
    log.info("run %s: %s", run_id, "its rollouts are over" if body.over else "more rollouts come")
    return encoded(request, body)


@router.get(
    "/runs/{run_id:path}",
    dependencies=read_by_run,
    response_model=RunView,
    summary="Where a run's groups are, and its side of the ledger: tokens sampled, and those that no lease brings",
)
async def read_run(
    request: Request,
    run_id: RunId,
    ledger: Annotated[
        bool,
        Query(
            description="false: without `sampled`, `borrowed` and `not_trained`, which grow with each policy version"
        ),
    ] = True,
) -> Response:
    return encoded(request, await services(request).store.runs.view(run_id, ledger=ledger))
