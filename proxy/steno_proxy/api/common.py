"""What the control plane's routers share: who is asking, the two encodings, the error envelope, and a trial's addresses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import Header, Request, Response
from pydantic import BaseModel

from steno.contracts.errors import ArchiveUnreadable, BadRequest, Conflict, NotFound, StenoError
from steno.contracts.records import ForkOf, Session, readable
from steno.contracts.rest import RUN_KEY, ErrorBody, ErrorEnvelope, SampleList, Trial, TurnPage
from steno.contracts.runs.leases import EPOCH_HEADER, GroupList
from steno.contracts.runs.training_steps import TrainingStepPage
from steno_proxy.api.agent_http import refusal_headers
from steno_proxy.auth.keys import Keyring, key_of
from steno_proxy.auth.viewer_cookie import cookies_of
from steno_proxy.config.settings import ProxySettings
from steno_proxy.pace import Pace
from steno_proxy.policies.keeper import PolicyKeeper
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.store_capacity import StoreCapacity
from steno_proxy.store.interface import SessionStore
from steno_proxy.workers.hub import Hub

MSGPACK = "application/msgpack"
Epoch = Annotated[
    int | None,
    Header(
        alias=EPOCH_HEADER,
        ge=1,
        le=2**53,
        description="the epoch that the trainer got when it registered; 409: a newer trainer has the run",
    ),
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
    what may come much later ends then. pace: of the process."""

    settings: ProxySettings
    keys: Keyring
    store: SessionStore
    recorder: Recorder
    hub: Hub
    policies: PolicyKeeper
    ports: Ports | None
    capacity: StoreCapacity
    pace: Pace
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


async def admin(request: Request) -> None:
    """Dependency: the admin key, or no auth at all."""
    services(request).keys.check_admin(key_of(request.scope["headers"]))


async def reader(request: Request) -> None:
    """Dependency of what reads and shows no key: the admin key, a viewer key, or the cookie of `/ui`."""
    services(request).keys.check_reader(key_of(request.scope["headers"]), reading_cookies(request))


def reading_cookies(request: Request) -> dict[str, bytes]:
    """The cookies of `/ui`; {} unless a GET comes from the page itself, or from no page. Browsers also send them with
    requests of pages at other ports of the same host, and `Sec-Fetch-Site` says so."""
    if request.method != "GET" or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return {}
    return cookies_of(request.headers.get("cookie", "").encode("latin-1"))


async def key_of_a_run(request: Request) -> None:
    """Dependency, for `check_run` to follow: the admin key, or what may be a run's. Others learn nothing of what they sent."""
    key = key_of(request.scope["headers"])
    if key is None or not key.startswith(RUN_KEY.encode()):
        services(request).keys.check_admin(key)


def check_run(request: Request, run_id: str | None) -> None:
    """The admin key, or the key of this run. Raises: Unauthorized, Forbidden."""
    services(request).keys.check_harness(key_of(request.scope["headers"]), None, run_id)


async def known_query(request: Request) -> None:
    """Dependency: a misspelt filter must not pass for none. Raises: BadRequest."""
    known = [str(parameter.alias) for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            there_are = f"known are {', '.join(known)}" if known else "this route takes none"
            raise BadRequest(f"{name[:64]}: unknown query parameter; {there_are}", field=name[:64])


async def harness_of_trial(request: Request, trial_id: str) -> None:
    """Dependency: the admin key, the harness key of this trial's group, or its run's key; to read, also who may read all. Who has
    none of them learns nothing of the trial, not even whether it exists."""
    found = services(request)
    key = key_of(request.scope["headers"])
    if found.keys.is_admin(key) or (request.method == "GET" and found.keys.is_reader(key, reading_cookies(request))):
        return
    if not found.keys.may_be_harness(key):
        found.keys.check_harness(key, None)
    found.keys.check_harness(key, *await _whose(found.store, trial_id))


async def _whose(store: SessionStore, trial_id: str) -> tuple[str | None, str | None]:
    """Group and run of a trial; of one that is deleted, or in an archive that can't be read, only if its group still names it.
    Raises: StoreUnavailable."""
    try:
        session = await store.session(trial_id)
    except StenoError as error:
        if error.retryable and not isinstance(error, ArchiveUnreadable):
            raise
        return await _group_that_names(store, trial_id)
    return session.group_id, session.run_id


async def _group_that_names(store: SessionStore, trial_id: str) -> tuple[str | None, str | None]:
    """Group and run of a trial whose record can't be read, so that its harness is told why; None: no group names it."""
    try:
        group = await store.group(trial_id.rpartition(".")[0])
    except NotFound:
        return None, None
    return (group.group_id, group.run_id) if trial_id in group.trial_ids else (None, None)


def encoded(request: Request, body: BaseModel, status: int = 200) -> Response:
    """A record or a page, as msgpack where the client accepts it (arrays as raw bytes), else as readable JSON."""
    if MSGPACK in request.headers.get("accept", ""):
        return Response(_ROOMY.encode(body.model_dump(mode="python")), status, media_type=MSGPACK)
    return Response(msgspec.json.encode(readable(body)), status, media_type="application/json")


async def encoded_items(
    request: Request, page: TurnPage | SampleList | GroupList | TrainingStepPage, at_once: int = 1
) -> Response:
    """As `encoded`, so many items at a time, so that what streams goes on: as JSON, 100,000 tokens take 20 ms."""
    if MSGPACK in request.headers.get("accept", ""):
        return encoded(request, page)
    pace, items = services(request).pace, []
    for start in range(0, len(page.items), at_once):
        await pace.turn()
        shown = [readable(item) for item in page.items[start : start + at_once]]
        await pace.turn()
        items += [msgspec.Raw(msgspec.json.encode(item)) for item in shown]
    await pace.turn()
    whole = readable(page.model_copy(update={"items": []})) | {"items": items}
    return Response(msgspec.json.encode(whole), media_type="application/json")


def trial(request: Request, session: Session) -> Trial:
    """A session with what its agent needs to know."""
    found = services(request)
    base = f"{base_url(request)}/{session.trial_id}"
    urls = {"openai": f"{base}/v1", "anthropic": base, "gemini": base}
    return Trial(session=session, urls=urls, api_key=found.keys.agent_key(session.trial_id, session.key_generation))


async def origin_of(request: Request, fork: ForkOf) -> Session:
    """The trial that a new one is forked from. Raises: Unauthorized, Forbidden: it is another run's; NotFound, Gone, Conflict: it
    can't be forked there; StoreUnavailable."""
    found = services(request)
    try:
        session = await found.store.session(fork.trial_id)
    except StenoError:
        check_run(request, (await _whose(found.store, fork.trial_id))[1])
        raise
    check_run(request, session.run_id)
    if session.status == "open":
        raise Conflict(
            f"fork_of.trial_id: trial {fork.trial_id} is still open; only one that has ended can be forked",
            field="fork_of.trial_id",
        )
    if "text_only" in session.marks:
        raise Conflict(
            f"fork_of.trial_id: trial {fork.trial_id} is text_only: it has no token ids to go on from",
            field="fork_of.trial_id",
        )
    await found.recorder.origins.of(session, fork)
    return session


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
    headers = {name.decode(): value.decode() for name, value in refusal_headers(error)}
    envelope = ErrorEnvelope(error=body, request_id=request_id)
    return Response(envelope.model_dump_json(), error.status, headers, media_type="application/json")


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "Refused; `code` and `field` say why."},
    "5XX": {"model": ErrorEnvelope, "description": "Failed; `retryable` says whether trying again helps."},
}
