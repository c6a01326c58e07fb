"""What the control plane's routers share: who is asking, the two encodings, the error envelope, and a trial's addresses."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import Header, Request, Response
from pydantic import BaseModel

from proxy.config import ProxySettings
from proxy.contracts.errors import BadRequest, StenoError
from proxy.contracts.leases import EPOCH_HEADER
from proxy.contracts.records import Session, readable
from proxy.contracts.rest import ErrorBody, ErrorEnvelope, Trial
from proxy.hub import Hub
from proxy.keys import Keyring, key_of
from proxy.policies.keeper import Policies
from proxy.recorder import Recorder
from proxy.store.base import SessionStore

MSGPACK = "application/msgpack"
Epoch = Annotated[
    int | None,
    Header(alias=EPOCH_HEADER, ge=1, le=2**53, description="of a registered trainer: older than the run's: 409"),
]
_ROOMY = msgspec.msgpack.Encoder(enc_hook=str)


@dataclass(slots=True)
class Ports:
    """Two ports, where the control plane has one of its own; 0 until they are listened on."""

    agents: int = 0
    control: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """What the routers work with: `request.app.state.services`. stopping: set when the proxy is told to stop; whoever waits for
    what may come much later ends then."""

    settings: ProxySettings
    keys: Keyring
    store: SessionStore
    recorder: Recorder
    hub: Hub
    policies: Policies
    ports: Ports | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


async def admin(request: Request) -> None:
    """Dependency: the admin key, or no auth at all."""
    services(request).keys.check_admin(key_of(request.scope["headers"]))


async def known_query(request: Request) -> None:
    """Dependency: a misspelt filter must not pass for none. Raises: BadRequest."""
    known = [str(parameter.alias) for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "this call has none"
            raise BadRequest(f"{name[:64]}: no such query parameter; {there_are}", field=name[:64])


async def harness_of_trial(request: Request, trial_id: str) -> None:
    """Dependency: the admin key, or the harness key of this trial's group. Who has neither learns nothing of the trial, not
    even whether it exists."""
    found = services(request)
    key = key_of(request.scope["headers"])
    if found.keys.is_admin(key):
        return
    try:
        group_id = (await found.store.session(trial_id)).group_id
    except StenoError as error:
        if error.retryable:
            raise
        group_id = None
    found.keys.check_harness(key, group_id)


def encoded(request: Request, body: BaseModel, status: int = 200) -> Response:
    """A record or a page, as msgpack where the client accepts it (arrays as raw bytes), else as readable JSON."""
    if MSGPACK in request.headers.get("accept", ""):
        return Response(_ROOMY.encode(body.model_dump(mode="python")), status, media_type=MSGPACK)
    return Response(msgspec.json.encode(_readable(body)), status, media_type="application/json")


def _readable(body: BaseModel) -> Any:
    items = getattr(body, "items", None)
    if isinstance(items, list) and items and isinstance(items[0], BaseModel):
        return {**body.model_dump(mode="json", exclude={"items"}), "items": [readable(item) for item in items]}
    return readable(body)


def trial(request: Request, session: Session) -> Trial:
    """A session with what its agent needs to know."""
    found = services(request)
    base = f"{base_url(request)}/{session.trial_id}"
    urls = {"openai": f"{base}/v1", "anthropic": base, "gemini": base}
    return Trial(session=session, urls=urls, api_key=found.keys.agent_key(session.trial_id, session.key_generation))


def base_url(request: Request) -> str:
    """How agents reach the proxy: `--public-url`, else the address that this request came to, with the agents' port where
    they have one of their own."""
    public = services(request).settings.public_url
    if public is not None:
        return public
    ports = services(request).ports
    host = f"[{request.url.hostname}]" if ":" in (request.url.hostname or "") else request.url.hostname
    where = request.url.netloc if ports is None else f"{host}:{ports.agents}"
    return f"{request.url.scheme}://{where}"


def error_response(error: StenoError, request_id: str) -> Response:
    """The control plane's one envelope."""
    body = ErrorBody(code=error.code, message=error.message, field=error.field, retryable=error.retryable)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    envelope = ErrorEnvelope(error=body, request_id=request_id)
    return Response(envelope.model_dump_json(), error.status, headers, media_type="application/json")


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "Refused; `code` and `field` say why."},
    "5XX": {"model": ErrorEnvelope, "description": "Failed; `retryable` says whether trying again helps."},
}
