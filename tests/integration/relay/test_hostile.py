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

from steno.contracts.chat import Sampling, TokenLogprob, ToolCallPiece
from steno.contracts.errors import BY_CODE, BadRequest, EngineFailed, WorkerLost
from steno.contracts.wire.channel import encode_alone, encode_packet
from steno.contracts.wire.frames import (
    Announce,
    Counted,
    Delta,
    Failed,
    Finish,
    Goodbye,
    Heartbeat,
    Hello,
    ModelCard,
    Progress,
    Started,
)
from steno.contracts.wire.packets import PacketToWorker
from steno_proxy.workers.stream import FROM_WORKERS
from tests.integration.relay.conftest import KEY, Relay, drain, relay
from tests.support.waiting import until
from tests.support.workers.counting import CountingEngine, ids_of


def hello(name: str = "rogue", **fields: Any) -> Hello:
    usual = Hello(1, 1, name, f"boot-{name}", [ModelCard("m", 100)], 100, ["resume"], key=KEY)
    return msgspec.structs.replace(usual, **fields)


async def dial(running: Relay, first: bytes | str | None, **headers: str) -> ClientConnection:
    url = f"ws://127.0.0.1:{running.port}/workers/connect"
    websocket = await connect(url, compression=None, additional_headers=headers, open_timeout=60)
    if first is not None:
        with contextlib.suppress(ConnectionClosed):  # refused by its header already; `farewell` reads why
            await websocket.send(first)
    return websocket


async def farewell(websocket: ClientConnection) -> tuple[str | None, int | None]:
    """(code of the Goodbye, close code) of a socket that the proxy closes."""
    goodbye = None
    try:
        async with asyncio.timeout(60):
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
        wronged, lost = running.open(20), running.open(20)
        await running.worker(CountingEngine(pace_s=0.002), worker_id="honest")
        honest = next(stream for trial in range(100) if (stream := _open_on(running, "honest", trial)))
        await rogue.send(packet(1, *frames))
        assert await farewell(rogue) == ("protocol_error", 4400)
        with pytest.raises(WorkerLost):  # its turn may go on at this worker, once it has a new channel
            await drain(lost)
        with pytest.raises(WorkerLost if frames[0].stream != 1 else EngineFailed):  # and this one's may not
            await drain(wronged)
        assert ids_of(await drain(honest)) == list(range(100))
        assert [view.id for view in running.hub.workers()] == ["honest"]
        assert running.hub.counts.channels["protocol_error"] == 1


def _open_on(running: Relay, worker_id: str, trial: int) -> Any:
    stream = running.open(100, trial_id=f"trial-{trial}")
    if stream.worker_id == worker_id:
        return stream
    stream.cancel("not this one")
    return None


BOUNDS = 2**31
CARD = ModelCard("m", 100)


def card(**fields: Any) -> ModelCard:
    return msgspec.structs.replace(CARD, **fields)


@pytest.mark.parametrize(
    "first",
    [
        hello(max_streams=0),
        hello(max_streams=2**40),
        hello(capabilities=["x"] * 1000),
        hello(resume="x" * 1000),
        hello(worker_id="x" * 1000),
        hello(models=[CARD] * 1000),
        hello(models=[card(context_tokens=0)]),
        hello(models=[card(context_tokens=BOUNDS)]),
        hello(models=[card(policy_version="x" * 1000)]),
        hello(models=[card(capabilities=["x"] * 1000)]),
        hello(max_packet_bytes=-1),
    ],
)
async def test_a_hello_out_of_bounds_is_refused(first: Hello) -> None:
    async with relay() as running:
        websocket = await dial(running, encode_alone(first, 0))
        assert await farewell(websocket) == ("protocol_error", 4400)
        assert running.hub.workers() == []


@pytest.mark.parametrize(
    "frame",
    [
        Heartbeat(-1, 0, 0.0),
        Heartbeat(0, 2**40, 0.0),
        Heartbeat(0, 0, 1.5),
        Heartbeat(0, 0, float("nan")),
        Announce([CARD] * 1000),
        Announce([card(name="x" * 10_000)]),
        Announce([card(context_tokens=-1)]),
        Counted(1, -1),
        Counted(1, BOUNDS),
        Progress("update", "ready", received=-1),
        Progress("update", "served", pause_s=float("nan")),
        Progress("update", "served", load_s=-1.0),
        Progress("update", "failed", code="x" * 1000),
        Started(1, -1, b"", 0, b"", Sampling()),
        Started(1, 0, b"", 0, b"x" * 1000, Sampling()),
        Delta(1, b"", b"", "x" * 1000),
    ],
)
async def test_what_a_worker_says_of_itself_out_of_bounds_ends_its_channel(frame: Any) -> None:
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        stream = running.open(5)
        await rogue.send(encode_alone(frame, 0) if isinstance(frame, Heartbeat) else packet(1, frame))
        assert await farewell(rogue) == ("protocol_error", 4400)
        with pytest.raises(WorkerLost):
            await drain(stream)


async def test_a_packet_of_very_many_frames_ends_the_channel() -> None:
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        await rogue.send(packet(1, *[Failed(1, "", "")] * 40_000))
        assert await farewell(rogue) == ("protocol_error", 4400)


PIECE = ToolCallPiece(0, "{}", "call-1", "look")
LOGPROB = TokenLogprob("x", b"x", -0.5, [])
MUCH = "x" * (32 * 2**20 + 1)


def delta(**fields: Any) -> Delta:
    return msgspec.structs.replace(DELTA, **fields)


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([delta(tool_calls=[ToolCallPiece(30_000_000, "{}", "id", "name")])], "index 30000000"),
        ([delta(tool_calls=[ToolCallPiece(-1, "{}", "id", "name")])], "index -1"),
        ([delta(tool_calls=[PIECE] * 600_000)], "completion of"),
        ([delta(content=MUCH)], "completion of"),
        ([delta(reasoning=MUCH[: 2**24]), delta(content=MUCH[: 2**24])], "completion of"),
        ([delta(tokens=[LOGPROB] * 2)], "2 log-probabilities"),
        ([delta(tokens=[TokenLogprob("x", b"x", -0.5, [("y", b"y", -1.0)] * 1000)])], "1000 alternatives"),
        ([Finish(1, "stop", 0, cached_tokens=-1)], "token counts"),
        ([Finish(1, "stop", 0, cached_tokens=BOUNDS)], "token counts"),
        ([Started(1, 0, b"", 0, b"", Sampling(stop_token_ids=[1] * 300_000))], "stops and biases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_a_worker_says_of_a_turn_out_of_bounds_ends_that_turn_alone(frames: list[Any], named: str) -> None:
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        wrong, right = running.open(5), running.open(5)
        first = [] if isinstance(frames[0], Started) else [STARTED]
        await rogue.send(packet(1, *first, *frames))
        with pytest.raises(EngineFailed, match=named):
            await drain(wrong)
        mine = [msgspec.structs.replace(frame, stream=2) for frame in (STARTED, DELTA, Finish(2, "stop", 1))]
        await rogue.send(packet(2, DELTA, *mine))  # of the one that was ended, this is late
        assert ids_of(await drain(right)) == [1]
        assert running.hub.counts.channels["protocol_error"] == 0 and running.hub.counts.late_tokens >= 1
        await rogue.close()


async def test_each_token_that_comes_after_the_end_of_its_stream_is_counted_as_late() -> None:
    """I4: after a cancel, and after the end. None of them is the stream's."""
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        cancelled, ended = running.open(5), running.open(5)
        two = msgspec.structs.replace(DELTA, ids=DELTA.ids * 2, logprobs=DELTA.logprobs * 2)
        second = [msgspec.structs.replace(frame, stream=2) for frame in (STARTED, DELTA, Finish(2, "stop", 1), two)]
        await rogue.send(packet(1, STARTED, two, *second))
        assert ids_of(await drain(ended)) == [1]
        await cancelled.next()
        cancelled.cancel("the client left")
        await rogue.send(packet(2, two, DELTA))
        counts = running.hub.counts
        await until(lambda: counts.late_tokens >= 5)
        assert (counts.tokens, counts.late_tokens) == (3, 5)
        assert (cancelled.received_tokens, ended.received_tokens) == (2, 1)
        assert (await drain(cancelled))[-1].completion_tokens == 2  # type: ignore[union-attr]
        channels = {"new": 1, "resumed": 0, "lost": 0, "refused": 0, "protocol_error": 0}
        assert counts.grown() == {"tokens": 3, "late_tokens": 5, **channels}
        assert not any(counts.grown().values())
        await rogue.close()


@pytest.mark.parametrize("code", [*sorted(BY_CODE.keys() - FROM_WORKERS), "x" * 10_000])
async def test_an_error_that_a_worker_can_not_know_of_is_its_engines(code: str) -> None:
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        stream = running.open(5)
        await rogue.send(packet(1, Failed(1, code, "y" * 10_000, "z" * 10_000, {"retry_after_s": float("nan")})))
        with pytest.raises(EngineFailed) as caught:
            await drain(stream)
        assert len(caught.value.message) == len(caught.value.field or "") == 2000
        await rogue.close()


async def test_a_request_that_a_worker_could_not_read_is_sent_to_no_other() -> None:
    """It says so with its last word, and by what it has acknowledged, which packet that was."""
    async with relay() as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        taken = running.open(5)
        await until(lambda: running.hub._workers["rogue"].peer.channel._transmitted == 1)
        unread = running.open(6)
        await until(lambda: running.hub._workers["rogue"].peer.channel._transmitted == 2)
        await rogue.send(encode_alone(Goodbye("protocol_error", "not a packet", True), 1))
        with pytest.raises(WorkerLost):
            await drain(taken)
        with pytest.raises(BadRequest, match="not a packet"):
            await drain(unread)
        await rogue.close()


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

        asyncio.run_coroutine_threadsafe(once(), loop).result(120)

    throw()


async def test_a_message_over_the_bound_closes_that_socket() -> None:
    async with relay(max_packet_bytes=65536) as running:
        rogue = await dial(running, encode_alone(hello(), 0))
        await until(lambda: running.hub.workers())
        await rogue.send(b"\0" * 70_000)
        assert await farewell(rogue) == ("protocol_error", 4400)
