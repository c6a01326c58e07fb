"""Two boots of a worker under one name: who has it keeps it for as long as it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection

from steno.contracts.errors import WorkerLost
from steno.contracts.wire.channel import encode_alone
from steno.contracts.wire.frames import Cancel, Goodbye, Welcome
from steno.contracts.wire.packets import NAME_TAKEN, REPLACED, PacketToWorker
from steno_proxy.workers import hub
from tests.integration.relay.conftest import drain, relay
from tests.integration.relay.test_hostile import dial, farewell, hello
from tests.support.machine.tcprelay import TcpRelay
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of


async def test_who_has_a_name_keeps_it_and_its_streams_and_the_other_gets_it_afterwards() -> None:
    async with relay() as running:
        older = await running.worker(CountingEngine(pace_s=0.005), worker_id="same")
        stream = running.open(100)
        newer = await running.worker(CountingEngine(), worker_id="same", connected=False)
        await until(lambda: newer.metric("steno_worker_channels_lost_total", code=NAME_TAKEN) >= 2)
        assert ids_of(await drain(stream)) == list(range(100))
        assert older.metric("steno_worker_channels_lost_total", code=REPLACED) == 0
        older.worker.stop()
        assert await older.task == 0
        await until(lambda: running.hub.cards())
        assert ids_of(await drain(running.open(3))) == [0, 1, 2]
        assert newer.engine.generated and not newer.task.done()


async def test_a_worker_started_again_gets_its_name_soon_from_a_socket_that_nobody_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.3)
    async with relay(silence_s=600.0, heartbeat_s=500.0) as running, TcpRelay("127.0.0.1", running.port) as line:
        await running.worker(CountingEngine(pace_s=0.01), worker_id="same", port=line.port)
        stream = running.open(10_000)
        await stream.next()
        line.lose()
        restarted = await running.worker(CountingEngine(), worker_id="same")
        with pytest.raises(WorkerLost):
            await drain(stream)
        assert ids_of(await drain(running.open(3))) == [0, 1, 2]
        assert restarted.engine.generated


async def packets(websocket: ClientConnection, kind: Any) -> Any:
    """The next frame of this kind that comes."""
    async with asyncio.timeout(60):
        while True:
            packet = msgspec.msgpack.decode(await websocket.recv(decode=False), type=PacketToWorker)
            for frame in packet.frames:
                if isinstance(frame, kind):
                    return frame


async def test_any_worker_of_this_protocol_answers_the_question_by_its_acknowledgement() -> None:
    """Those of earlier releases know nothing of it: a Cancel of a stream that never was, which they acknowledge as anything."""
    async with relay(heartbeat_s=500.0, silence_s=600.0) as running:
        older = await dial(running, encode_alone(hello("same"), 0))
        assert isinstance(await packets(older, Welcome), Welcome)
        newer = await dial(running, encode_alone(hello("same", boot_id="another"), 0))
        assert (await packets(older, Cancel)).stream == 0
        await older.send(encode_alone(None, 1))
        assert await farewell(newer) == (NAME_TAKEN, 4409)
        assert [view.connected for view in running.hub.workers()] == [True]
        again = await dial(running, encode_alone(hello("same"), 0))  # its own boot: at once, and unasked
        assert isinstance(await packets(again, Welcome), Welcome)
        assert await farewell(older) == (None, 4409)


async def test_who_says_nothing_is_told_that_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    async with relay(heartbeat_s=500.0, silence_s=600.0) as running:
        older = await dial(running, encode_alone(hello("same"), 0))
        await packets(older, Welcome)
        newer = await dial(running, encode_alone(hello("same", boot_id="another"), 0))
        assert isinstance(await packets(newer, Welcome), Welcome)
        goodbye = await packets(older, Goodbye)
        assert (goodbye.code, goodbye.final) == (REPLACED, True)


async def test_a_key_that_is_revoked_while_a_name_is_asked_for_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 3.0)
    async with relay(heartbeat_s=500.0, silence_s=600.0) as running:
        older = await dial(running, encode_alone(hello("same"), 0))
        await packets(older, Welcome)
        newer = await dial(running, encode_alone(hello("same", boot_id="another"), 0))
        await packets(older, Cancel)
        running.hub.is_worker = lambda key: False
        assert await farewell(newer) == ("unauthorized", 4401)
