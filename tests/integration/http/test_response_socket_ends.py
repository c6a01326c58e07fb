"""Sockets of Responses where a message is refused unread, of which nothing is kept."""

from __future__ import annotations

import asyncio

from steno_proxy.api.bodies_in_flight import BodiesInFlight
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.test_response_socket import asked, opened
from tests.support.parrot import ParrotEngine, Say
from tests.support.waiting import until

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
