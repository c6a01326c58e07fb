"""Leases and runs: completed groups on their way to a trainer, and how far a run is. Admin key only (I8)."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from proxy import leasing, metrics
from proxy.api.common import ERRORS, Epoch, admin, encoded, known_query, services
from proxy.contracts.errors import Conflict
from proxy.contracts.leases import (
    Heartbeat,
    LeaseExtension,
    LeaseList,
    LeaseRequest,
    LeaseTerm,
    RunView,
    TakeOver,
    Tenure,
)

log = logging.getLogger(__name__)

RunId = Annotated[str, Path(max_length=128)]
LeaseId = Annotated[str, Path(max_length=2048, description="as granted")]
router = APIRouter(tags=["leases"], responses=ERRORS, dependencies=[Depends(admin), Depends(known_query)])


@router.post("/leases", response_model=LeaseList, summary="Lease completed groups, oldest ready first; waits for them")
async def lease(request: Request, body: LeaseRequest, epoch: Epoch = None) -> Response:
    proxy = services(request)
    found = await leasing.lease(proxy.store.runs, body, request.is_disconnected, stopping=proxy.stopping, epoch=epoch)
    for one in found:
        log.info("group %s leased to %s (grant %d)", one.group.group_id, body.consumer, one.grants)
    return encoded(request, LeaseList(items=found))


@router.post(
    "/leases/{lease_id}/ack",
    response_model=LeaseTerm,
    summary="The step that used the group is durable: it is never served again (idempotent; a lost lease is a conflict)",
)
async def acknowledge(request: Request, lease_id: LeaseId) -> Response:
    try:
        held_s = await services(request).store.runs.acknowledge(lease_id)
    except Conflict:
        metrics.LEASES.labels("refused").inc()
        raise
    if held_s is not None:
        metrics.LEASES.labels("acknowledged").inc()
        metrics.LEASE_SECONDS.observe(held_s)
    return encoded(request, LeaseTerm(lease_id=lease_id))


@router.post(
    "/leases/{lease_id}/release",
    response_model=LeaseTerm,
    summary="Give the group back: it is served again at once (idempotent; a lost lease is a conflict)",
)
async def release(request: Request, lease_id: LeaseId) -> Response:
    await services(request).store.runs.release(lease_id)
    metrics.LEASES.labels("released").inc()
    return encoded(request, LeaseTerm(lease_id=lease_id))


@router.post(
    "/leases/{lease_id}/extend",
    response_model=LeaseTerm,
    summary="Hold the group for `ttl_s` from now (a lost lease is a conflict)",
)
async def extend(request: Request, lease_id: LeaseId, body: LeaseExtension | None = None) -> Response:
    wanted = body or LeaseExtension()
    runs = services(request).store.runs
    expires_at = await runs.extend(lease_id, wanted.ttl_s, used=wanted.used)
    return encoded(request, LeaseTerm(lease_id=lease_id, expires_at=expires_at))


@router.post(
    "/runs/{run_id:path}/trainer",
    response_model=Tenure,
    summary="Register as the run's trainer: the one before is superseded (409), and what it had leased is served again at once; "
    "one that was heard of in the last 15 s is not taken over from (409 trainer_alive, retry-after), unless `take_over`",
)
async def take_over(request: Request, run_id: RunId, body: TakeOver) -> Response:
    tenure = await services(request).store.runs.take_over(run_id, body.trainer, force=body.take_over)
    log.info("run %s: its trainer is %s (epoch %d)", run_id, tenure.trainer, tenure.epoch)
    return encoded(request, tenure)


@router.post(
    "/runs/{run_id:path}/trainer/heartbeat",
    response_model=Tenure,
    summary="A registered trainer lives, or leaves; 409 superseded: it must end",
)
async def heartbeat(request: Request, run_id: RunId, body: Heartbeat) -> Response:
    await services(request).store.runs.heartbeat(run_id, body.trainer, body.epoch, leaving=body.leaving)
    return encoded(request, Tenure(run_id=run_id, trainer=body.trainer, epoch=body.epoch))


@router.get(
    "/runs/{run_id:path}",
    response_model=RunView,
    summary="Where a run's groups are, and its side of the ledger: tokens sampled, and those that no lease brings",
)
async def read_run(request: Request, run_id: RunId) -> Response:
    return encoded(request, await services(request).store.runs.view(run_id))
