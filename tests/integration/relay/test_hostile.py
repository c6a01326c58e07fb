"""Workers that break the protocol: each is closed with a reason, and the others' streams do not notice."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from proxy.contracts.canonical import Sampling
from proxy.contracts.channel import encode_alone, encode_packet
from proxy.contracts.errors import WorkerLost
from proxy.contracts.frames import Delta, Failed, Finish, Goodbye, Hello, ModelCard, Started
from proxy.contracts.packets import PacketToWorker
from tests.integration.relay.conftest import KEY, Relay, drain, relay
from tests.support.counting import CountingEngine, ids_of
from tests.support.waiting import until


def hello(name: str = "rogue", **fields: Any) -> Hello:
    usual = Hello(1, 1, name, f"boot-{name}", [ModelCard("m", 100)], 100, ["resume"], key=KEY)
    return msgspec.structs.replace(usual, **fields)


async def dial(running: Relay, first: bytes | str | None, **headers: str) -> ClientConnection:
    url = f"ws://127.0.0.1:{running.port}/workers/connect"
    websocket = await connect(url, compression=None, additional_headers=headers)
    if first is not None:
        with contextlib.suppress(ConnectionClosed):  # refused by its header already; `farewell` reads why
            await websocket.send(first)
    return websocket


async def farewell(websocket: ClientConnection) -> tuple[str | None, int | None]:
    """(code of the Goodbye, close code) of a socket that the proxy closes."""
    goodbye = None
    try:
        async with asyncio.timeout(5):
            while True:
                packet = msgspec.msgpack.decode(await websocket.recv(decode=False), type=PacketToWorker)
                goodbye = next((frame.code for frame in packet.frames if isinstance(frame, Goodbye)), goodbye)
    except ConnectionClosed as closed:
        return goodbye, closed.rcvd.code if closed.rcvd else None


def packet(seq: int, *frames: Any) -> bytes:
    return encode_packet(seq, 0, [msgspec.msgpack.encode(frame) for frame in frames])


@pytest.mark.parametrize(
    ("first", "headers", "expected"),
    [
        (encode_alone(hello(key="wrong"), 0), {}, ("unauthorized", 4401)),
        (encode_alone(hello(key=""), 0), {}, ("unauthorized", 4401)),
        (encode_alone(hello(), 0), {"Authorization": "Bearer wrong"}, ("unauthorized", 4401)),
        (encode_alone(hello(protocol_min=2, protocol_max=3), 0), {}, ("version", 4406)),
        (b"garbage", {}, ("protocol_error", 4400)),
        ("text", {}, ("protocol_error", 4400)),
        (packet(1, hello()), {}, ("protocol_error", 4400)),
        (b"x" * 300_000, {}, ("protocol_error", 4400)),
    ],
)
async def test_a_socket_without_a_proper_hello_is_refused_with_a_reason(
    first: bytes, headers: dict[str, str], expected: tuple[str, int]
) -> None:
    async with relay() as running:
        websocket = await dial(running, first, **headers)
        assert await farewell(websocket) == expected
        assert running.hub.workers() == []


async def test_the_key_may_come_in_the_header_instead_of_the_hello() -> None:
    async with relay() as running:
        websocket = await dial(running, encode_alone(hello(key=""), 0), Authorization=f"Bearer {KEY}")
        await until(lambda: running.hub.workers())
        await websocket.close()


STARTED = Started(1, 0, b"", 0, b"", Sampling())
DELTA = Delta(1, b"\1\0\0\0", b"\0\0\0\0", "base/0")


@pytest.mark.parametrize(
    "frames",
    [
        [DELTA],  # before Started
        [STARTED, STARTED],
        [STARTED, Delta(1, b"\1\0\0", b"\0\0\0", "base/0")],
        [STARTED, Delta(1, b"\1\0\0\0", b"", "base/0")],  # a token without its log-probability (I1)
        [Started(1, 3, b"", 3, b"", Sampling())],  # keeps what was never given
        [Started(1, 0, b"\1\0\0\0", 2, b"", Sampling())],
        [STARTED, *[DELTA] * 9],  # more than the window
        [STARTED, DELTA, Finish(1, "stop", 2)],  # counts otherwise
        [Finish(1, "stop", 0)],
        [Failed(77, "engine_failed", "a stream that never was")],
    ],
)
async def test_frames_that_can_not_be_end_that_workers_channel_and_nobody_elses(frames: list[Any]) -> None:
    async with relay(window_tokens=8) as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        lost = running.open(5)
        await running.worker(CountingEngine(pace_s=0.002), worker_id="honest")
        honest = next(stream for trial in range(100) if (stream := _open_on(running, "honest", trial)))
        await rogue.send(packet(1, *frames))
        assert await farewell(rogue) == ("protocol_error", 4400)
        with pytest.raises(WorkerLost):
            await drain(lost)
        assert ids_of(await drain(honest)) == list(range(100))
        assert [view.id for view in running.hub.workers()] == ["honest"]
        assert running.hub.counts.protocol_errors == 1


def _open_on(running: Relay, worker_id: str, trial: int) -> Any:
    stream = running.open(100, trial_id=f"trial-{trial}")
    if stream.worker_id == worker_id:
        return stream
    stream.cancel("not this one")
    return None


async def test_any_bytes_at_the_endpoint_leave_an_honest_workers_stream_whole() -> None:
    async with relay() as running:
        await running.worker(CountingEngine(pace_s=0.01), worker_id="honest")
        stream = running.open(100)
        results = asyncio.create_task(drain(stream))
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(_throw_bytes, running, loop)
        assert ids_of(await results) == list(range(100))
        assert [view.id for view in running.hub.workers()] == ["honest"]


def _throw_bytes(running: Relay, loop: asyncio.AbstractEventLoop) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.lists(st.binary(max_size=300), min_size=1, max_size=4))
    def throw(greet_first: bool, messages: list[bytes]) -> None:
        async def once() -> None:
            first = encode_alone(hello(), 0) if greet_first else messages[0]
            websocket = await dial(running, first)
            try:
                for message in messages:
                    await websocket.send(message)
                code, close_code = await farewell(websocket)
                assert (code, close_code) == ("protocol_error", 4400)
            except ConnectionClosed as closed:
                assert closed.rcvd is not None
                assert closed.rcvd.code == 4400

        asyncio.run_coroutine_threadsafe(once(), loop).result(20)

    throw()


async def test_a_message_over_the_bound_closes_that_socket() -> None:
    async with relay(max_packet_bytes=65536) as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        await rogue.send(b"\0" * 70_000)
        assert await farewell(rogue) == ("protocol_error", 4400)


async def test_two_workers_with_one_name_the_newer_wins_and_the_older_does_not_come_back() -> None:
    async with relay() as running:
        older = await running.worker(worker_id="same")
        newer = await running.worker(worker_id="same", connected=False)
        assert await asyncio.wait_for(older.task, 5) == 2
        await until(lambda: running.hub.cards())
        assert ids_of(await drain(running.open(3))) == [0, 1, 2]
        assert not newer.task.done()
