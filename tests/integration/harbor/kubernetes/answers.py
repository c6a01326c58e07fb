"""What a played cluster answers with, the faults that it is told, and the end of its thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Manifest = dict[str, Any]


@dataclass
class Fault:
    """What becomes of the next `times` requests like this. how: `refuse`: with `status`; `lose`: it is done, and 504 is answered;
    `slow`: it is done after `seconds`."""

    method: str
    path: str
    how: str
    times: int = 1
    status: int = 503
    words: str = "told to"
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


class Ends:
    """Tells the server's thread."""

    def begin(self) -> asyncio.Event:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        return self._event

    def now(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)


def selected(found: Manifest, selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    wanted = [each.partition("=") for each in selector.split(",")]
    return all(name in labels and value in ("", labels[name]) for name, _, value in wanted)


def status(code: int, message: str, headers: dict[str, str] | None = None, reason: str = "") -> web.Response:
    """reason: default: of this code."""
    said = reason or {403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}.get(code, "")
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code, "reason": said}
    return web.json_response(body, status=code, headers=headers)
