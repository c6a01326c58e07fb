"""What is asked of a session that has ended, at a replica that has just come back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from tests.chaos import story
from tests.chaos.clients.formats import FORMATS
from tests.chaos.story import Story
from tests.chaos.system.deployment import Deployment


async def frozen(monkeypatch: pytest.MonkeyPatch, statuses: list[int | None], patience_s: float) -> list[str]:
    """What is found wrong. Args: statuses: of the answers to a late request, one after the other; None: its connection breaks."""
    monkeypatch.setattr(story, "CONTROL_S", patience_s)

    async def answer(request: web.Request) -> web.Response:
        status = statuses.pop(0)
        if status is None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        return web.Response(status=status or 500)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    deployment = SimpleNamespace(direct=lambda replica: url)
    told = Story(cast(Deployment, deployment), cast(Any, SimpleNamespace(seed=1)), [], name="late")
    told._trials = [cast(Any, SimpleNamespace(trial_id="t", agent=SimpleNamespace(format=next(iter(FORMATS)))))]

    async def ended(trial: object) -> None: ...

    monkeypatch.setattr(told, "_end", ended)
    try:
        async with aiohttp.ClientSession() as http:
            await told._frozen(http)
    finally:
        await runner.cleanup()
    return told.verdict.wrong


async def test_a_connection_that_breaks_is_no_answer_and_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await frozen(monkeypatch, [None, None, 503, 410], patience_s=60.0) == []


async def test_a_late_request_that_is_answered_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    [wrong] = await frozen(monkeypatch, [None, 200], patience_s=60.0)
    assert wrong.endswith("t has ended, and a late request was answered 200")


async def test_a_connection_that_breaks_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(aiohttp.ClientError):
        await frozen(monkeypatch, [None] * 3, patience_s=-1.0)
