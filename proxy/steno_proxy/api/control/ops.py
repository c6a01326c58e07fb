"""Health, readiness, version and metrics, for operators and orchestrators."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from steno.contracts.errors import StenoError, StoreUnavailable
from steno_proxy import metrics
from steno_proxy.api.common import ERRORS, Services, encoded, reader, services
from steno_proxy.auth.keys import key_of

router = APIRouter(tags=["operations"], responses=ERRORS)


class Health(BaseModel):
    """time: the proxy's clock, Unix seconds."""

    status: str = "ok"
    time: float = Field(default_factory=time.time)


class Version(BaseModel):
    version: str


class Readiness(Health):
    """status: "ok", or what is missing. models: that can be served now. store: "ok", or why it does not answer.
    waited_replicas: how many replicas of the store have each write before anybody is told (`redis_wait_replicas`)."""

    store: str = "ok"
    waited_replicas: int = 0
    models: list[str] = []


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_model=Health, summary="200 as long as the process answers; checks nothing else")
async def healthz(request: Request) -> Response:
    return encoded(request, Health())


@router.head("/health", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.get(
    "/health", response_class=Response, summary="As vLLM has it: 200 without a body, as long as the process answers"
)
async def health() -> Response:
    return Response()


@router.get(
    "/version", dependencies=[Depends(reader)], response_model=Version, summary="Steno's version, in vLLM's form"
)
async def version(request: Request) -> Response:
    return encoded(request, Version(version=request.app.version))


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness}},
    summary="200 if the store answers, with the models that can be served; having no worker yet is no error",
)
async def readyz(request: Request) -> Response:
    found = services(request)
    models = [card.name for card in found.hub.cards()]
    status, waited = "ok" if models else "no worker", found.store.waited_replicas
    health = Readiness(status=status, models=models, waited_replicas=waited)
    try:
        await found.store.ping()
        found.keys.check_settled()
    except StenoError as error:
        health.status, health.store = "store", error.message
        return encoded(request, health, 503)
    return encoded(request, health)


async def _reader(request: Request) -> None:
    """Dependency: a metrics key or the admin key, or no auth at all."""
    services(request).keys.check_metrics(key_of(request.scope["headers"]))


@router.get(
    "/metrics",
    dependencies=[Depends(_reader)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="For Prometheus",
)
async def scrape(request: Request) -> Response:
    found = services(request)
    _gauges(found)
    await _groups(found)
    return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _gauges(found: Services) -> None:
    metrics.WORKERS.set(sum(worker.connected for worker in found.hub.workers()))
    metrics.MODELS.set(len(found.hub.cards()))
    metrics.BEHIND.set(sum(bool(worker.behind) for worker in found.hub.workers()))
    metrics.SUSPECT.set(sum(bool(worker.suspect) for worker in found.hub.workers()))
    grown = found.hub.counts.grown()
    tokens, late = grown.pop("tokens"), grown.pop("late_tokens")
    metrics.RECEIVED_TOKENS.inc(tokens + late)
    metrics.LATE_TOKENS.inc(late)
    for how, channels in grown.items():
        metrics.CHANNELS.labels(how).inc(channels)
    trees, size = found.recorder.trees()
    metrics.TREES.set(trees)
    metrics.TREE_BYTES.set(size)


async def _groups(found: Services) -> None:
    """Groups in hand; as they were, while the store does not answer: other metrics are wanted then."""
    try:
        in_hand = await found.store.runs.in_hand()
    except StoreUnavailable:
        metrics.STORE_ERRORS.labels("in_hand").inc()
        return
    for state, count in in_hand._asdict().items():
        metrics.GROUPS.labels(state).set(count)
