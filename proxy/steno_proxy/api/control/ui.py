"""`/ui`: the page that shows what is on record, and how a browser comes to read it.

Anybody gets the page, not the records: its user gives the admin key or a viewer key once, and gets a cookie that no script
sees (`viewer_cookie.py`). The cookie counts for GET alone, so that no page can have a browser write anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from steno.contracts.errors import Forbidden, NotFound
from steno_proxy.api.common import ERRORS, encoded, reading_cookies, services
from steno_proxy.auth import viewer_cookie
from steno_proxy.auth.keys import key_of
from steno_proxy.viewer.assets import HEADERS, assets

router = APIRouter(tags=["viewer"], responses=ERRORS, include_in_schema=False)


class ViewerLogin(BaseModel):
    """`POST /ui/login`. key: the admin key or a viewer key."""

    model_config = ConfigDict(extra="forbid")
    key: SecretStr = Field(max_length=4096)


class ViewerState(BaseModel):
    """`GET /ui/state`. keys: whether any is asked for. reads: whether this browser may read. live: what is shown may grow."""

    keys: bool
    reads: bool
    version: str
    live: bool = True


@router.get("/ui")
async def to_page() -> Response:
    """Redirect to the page by a relative path, which keeps the prefix of a reverse proxy."""
    return Response(status_code=307, headers={"location": "ui/", **HEADERS})


@router.get("/ui/")
async def page(request: Request) -> Response:
    return _sent(request, "index.html")


@router.get("/ui/static/{name}")
async def static(request: Request, name: Annotated[str, Path(max_length=64)]) -> Response:
    return _sent(request, name)


def _sent(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise NotFound(f"{request.url.path[:100]} is not served here")
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers={**HEADERS, "etag": found.etag})
    return Response(found.body, headers=found.headers)


@router.get("/ui/state")
async def state(request: Request) -> Response:
    keys = services(request).keys
    reads = keys.is_reader(key_of(request.scope["headers"]), reading_cookies(request))
    return encoded(request, ViewerState(keys=keys.enabled, reads=reads, version=request.app.version))


@router.post("/ui/login")
async def login(request: Request, body: ViewerLogin) -> Response:
    _own_page(request)
    found = services(request)
    if found.keys.enabled:
        value = found.keys.viewer_cookie(body.key.get_secret_value().strip().encode())
        return _with_cookies(request, {found.keys.cookie_names[0]: value}, viewer_cookie.LASTS_S)
    return Response(status_code=204)


@router.post("/ui/logout")
async def logout(request: Request) -> Response:
    _own_page(request)
    return _with_cookies(request, dict.fromkeys(services(request).keys.cookie_names, ""), 0)


def _with_cookies(request: Request, values: Mapping[str, str], lasts_s: int) -> Response:
    answer = Response(status_code=204, headers={"cache-control": "no-store"})
    for name, value in values.items():
        answer.set_cookie(
            name, value, max_age=lasts_s, path="/", httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
    return answer


def _own_page(request: Request) -> None:
    """Raises: Forbidden: another page has the browser log in, or out."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise Forbidden("Sec-Fetch-Site: only the page /ui logs in and out", field="sec-fetch-site")
