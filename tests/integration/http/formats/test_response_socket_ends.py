"""Sockets of Responses where a message is refused unread, of which nothing is kept, and where the proxy is told to stop."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from steno_proxy.api.bodies_in_flight import BodiesInFlight
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.formats.test_response_socket import asked, opened
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

LARGE = "x" * 300_000


def in_flight(proxy: Proxy) -> BodiesInFlight:
    found: BodiesInFlight = proxy.app.sockets["/v1/responses"]._inflight
    return found


async def test_a_message_that_is_refused_unread_is_not_counted_any_more() -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("hello", gates={1: gate}), context_tokens=2**20)
    async with running(engine, trial_streams=1) as proxy:
        first = asyncio.create_task(proxy.chat("t", "x"))
        await until(lambda: proxy.engine.requests)
        for number in range(64):  # as many as are remembered: of the next one nothing is read
            assert (await proxy.chat("t", f"refused {number}")).status_code == 429
        async with opened(proxy) as wire:
            for _ in range(3):
                [event] = await asked(wire, input=LARGE)
                assert event["status"] == 429
                assert in_flight(proxy).bytes == 0
            gate.set()
            assert (await first).status_code == 200
            assert (await asked(wire, input=LARGE))[-1]["type"] == "response.completed"
            assert in_flight(proxy).bytes == 0


async def test_nor_is_one_whose_key_was_rotated() -> None:
    async with running(admin_key="admin") as proxy:
        key = (await proxy.http.post("/sessions/t")).json()["api_key"]
        async with opened(proxy, key=key) as wire:
            await proxy.http.post("/sessions/t/rotate-key")
            [event] = await asked(wire, input=LARGE)
            assert event["status"] == 403
            assert in_flight(proxy).bytes == 0


async def test_a_proxy_told_to_stop_closes_idle_sockets_at_once_and_busy_ones_after_their_response() -> None:
    gate = asyncio.Event()
    async with (
        running(ParrotEngine(lambda request: Say("hello", gates={1: gate}))) as proxy,
        opened(proxy) as idle,
        opened(proxy) as busy,
        opened(proxy) as busier,
    ):
        answers = [asyncio.create_task(asked(wire, input="x")) for wire in (busy, busier)]
        await until(lambda: len(proxy.engine.requests) == 2)
        proxy.app.state.services.stopping.set()  # as the server does
        draining = asyncio.create_task(proxy.app.state.turns.drain(60))
        assert await closed(idle) == 1012
        with pytest.raises(InvalidStatus) as refused:
            await opened(proxy)
        assert refused.value.response.status_code == 503
        await busier.send(json.dumps({"type": "response.create", "input": "y"}))
        gate.set()
        for events in await asyncio.gather(*answers):
            assert events[-1]["type"] == "response.completed"
        assert await closed(busy) == 1012
        assert await closed(busier) == 1012  # what waits there is for another replica
        await draining
        assert len(await proxy.turns("t")) == 2


async def closed(wire: ClientConnection) -> int | None:
    """The code that the proxy closes it with, and says nothing before it."""
    with pytest.raises(ConnectionClosed) as found:
        await asyncio.wait_for(wire.recv(), 60)
    return found.value.rcvd.code if found.value.rcvd is not None else None
