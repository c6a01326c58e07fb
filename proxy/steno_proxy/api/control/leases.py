"""Leases: completed groups on their way to a trainer. Admin key only (I8)."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from steno.contracts.errors import Conflict
from steno.contracts.runs.leases import LeaseExtension, LeaseList, LeaseRequest, LeaseTerm
from steno_proxy import metrics
from steno_proxy.api import lease_wait
from steno_proxy.api.common import ERRORS, Epoch, admin, encoded, known_query, services

log = logging.getLogger(__name__)

RunId = Annotated[str, Path(max_length=128)]
LeaseId = Annotated[str, Path(max_length=2048, description="as granted")]
router = APIRouter(tags=["leases"], responses=ERRORS, dependencies=[Depends(admin), Depends(known_query)])


@router.post("/leases", response_model=LeaseList, summary="Lease completed groups, oldest ready first; waits for them")
async def lease_groups(request: Request, body: LeaseRequest, epoch: Epoch = None) -> Response:
    proxy = services(request)
    found = await lease_wait.lease(
        proxy.store.runs, body, request.is_disconnected, stopping=proxy.stopping, epoch=epoch
    )
    for one in found:
        log.info("group %s leased to %s (grant %d)", one.group.group_id, body.consumer, one.grants)
    return encoded(request, LeaseList(items=found))


@router.post(
    "/leases/{lease_id}/ack",
    response_model=LeaseTerm,
    summary="The step that used the group is durable: it is never served again (idempotent; a lost lease is a conflict)",
)
async def acknowledge_lease(request: Request, lease_id: LeaseId) -> Response:
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
async def release_lease(request: Request, lease_id: LeaseId) -> Response:
    await services(request).store.runs.release(lease_id)
    metrics.LEASES.labels("released").inc()
    return encoded(request, LeaseTerm(lease_id=lease_id))


@router.post(
    "/leases/{lease_id}/extend",
    response_model=LeaseTerm,
    summary="Hold the group for `ttl_s` from now (a lost lease is a conflict)",
)
async def extend_lease(request: Request, lease_id: LeaseId, body: LeaseExtension | None = None) -> Response:
    wanted = body or LeaseExtension()
    runs = services(request).store.runs
    expires_at = await runs.extend(lease_id, wanted.ttl_s, used=wanted.used)
    return encoded(request, LeaseTerm(lease_id=lease_id, expires_at=expires_at))
