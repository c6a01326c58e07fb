"""Policies: which version is served, and new weights for the workers (docs/trainer-operations.md#policy-updates).

A post answers 202 at once and is polled: a sender that takes part in the update could not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.requests import ClientDisconnect

from steno.contracts.policy import ModelNames, PolicyList, Received, Update, UpdateSpec
from steno_proxy.api.common import ERRORS, Epoch, admin, encoded, known_query, reader, services

MOST_WAIT_S = 60.0
router = APIRouter(tags=["policy"], responses=ERRORS)
_admin = [Depends(admin), Depends(known_query)]
_reader = [Depends(reader), Depends(known_query)]
UpdateId = Annotated[str, Path(min_length=1, max_length=64)]


@router.get(
    "/policy",
    dependencies=_reader,
    response_model=PolicyList,
    summary="Every policy: its version in force, and who serves which version",
)
async def list_policies(request: Request) -> Response:
    return encoded(request, PolicyList(items=services(request).policies.views()))


@router.get(
    "/policy/models",
    dependencies=_reader,
    response_model=ModelNames,
    summary="Model names that workers have served, and who serves them now",
)
async def list_model_names(request: Request) -> Response:
    return encoded(request, ModelNames(items=services(request).policies.models()))


@router.delete(
    "/policy/models/{name:path}",
    dependencies=_admin,
    status_code=204,
    summary="Retire a model name: requests for it go to the default policy from now on (409 while a worker serves it; 404: no "
    "worker has served it, or it was retired)",
)
async def retire_model(request: Request, name: Annotated[str, Path(min_length=1, max_length=1024)]) -> Response:
    await services(request).policies.retire(name)
    return Response(status_code=204)


@router.post(
    "/policy/updates",
    dependencies=_admin,
    response_model=Update,
    status_code=202,
    summary="Bring new weights to every worker of a policy (the same again: the recorded update; other weights under a known "
    "version: 409)",
)
async def post_update(request: Request, spec: UpdateSpec, epoch: Epoch = None) -> Response:
    if epoch is not None:
        await services(request).store.runs.check_epoch(spec.run_id, epoch)
    return encoded(request, await services(request).policies.post(spec), 202)


@router.get(
    "/policy/updates/{update_id}",
    dependencies=_reader,
    response_model=Update,
    summary="How far an update is, and what is to be uploaded",
)
async def get_update(
    request: Request,
    update_id: UpdateId,
    wait_s: float = Query(
        0.0, ge=0, le=MOST_WAIT_S, description="most seconds to wait until the update has ended or wants bytes"
    ),
) -> Response:
    found = services(request)
    waits = asyncio.ensure_future(found.policies.update(update_id, wait_s))
    stops = asyncio.ensure_future(found.stopping.wait())
    try:
        await asyncio.wait({waits, stops}, return_when=asyncio.FIRST_COMPLETED)
        return encoded(request, await (waits if waits.done() else found.policies.update(update_id)))
    finally:
        waits.cancel()
        stops.cancel()


@router.put(
    "/policy/updates/{update_id}/shards/{name}",
    dependencies=_admin,
    response_model=Received,
    summary="Bytes of a shard from `offset` on, as `wants` of the update asks (transport `stream`); passed on as they come",
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def upload_shard(request: Request, update_id: UpdateId, name: str, offset: int = Query(0, ge=0)) -> Response:
    found = services(request)
    body = _patient(request.stream(), found.settings.body_timeout_s)
    received = await found.policies.upload(update_id, name, offset, body)
    return encoded(request, Received(received=received))


async def _patient(stream: AsyncIterator[bytes], timeout_s: float) -> AsyncIterator[bytes]:
    """The body until it ends, or breaks off, or nothing of it comes for so long: what came was passed on and counts."""
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                data = await anext(stream)
        except (StopAsyncIteration, ClientDisconnect, TimeoutError):
            return
        yield data
