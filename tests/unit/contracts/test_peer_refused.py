"""What an end of the relay protocol does not take: it says why, and the channel ends."""

from __future__ import annotations

import msgspec
import pytest

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.channel import encode_alone, encode_packet
from steno.contracts.wire.frames import (
    Cancel,
    Credit,
    Goodbye,
    Heartbeat,
    Welcome,
)
from steno.contracts.wire.packets import REFUSALS, PacketToProxy, PacketToWorker, read_hello
from steno.contracts.wire.peer import (
    ChannelLost,
    PeerState,
)
from tests.unit.contracts.test_peer import MAX_BYTES, carry, connect, delta, hello, proxy_end, worker_end


def test_versions_without_overlap_are_refused() -> None:
    proxy, worker = proxy_end(), worker_end()
    worker.connected(0.0)
    with pytest.raises(ProtocolError):
        proxy.accept(hello(protocol_min=7, protocol_max=9), 0.0)
    (refusal,) = proxy.data_to_send()
    lost, _ = worker.receive(refusal, 0.0)
    assert isinstance(lost, ChannelLost)
    assert lost.code in REFUSALS


WELCOME = Welcome(1, "p", "proxy-1", False, 0, 5.0, 30.0, MAX_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff" * 40,
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1, 0, [["no such frame", 1]]]),
        msgspec.msgpack.encode([1, 0, [["d", "not a number", b"", b"", ""]]]),
        msgspec.msgpack.encode([1, 0, [Cancel(1)]]),  # the wrong way
        msgspec.msgpack.encode([1, 0, [Heartbeat()]]),  # in the order
        msgspec.msgpack.encode([0, 0, [delta(1)]]),  # outside it
        msgspec.msgpack.encode([2, 0, [delta(1)]]),  # a gap
        msgspec.msgpack.encode([1, 1, [delta(1)]]),  # acknowledges what was never sent
        msgspec.msgpack.encode([-1, 0, []]),
        msgspec.msgpack.encode([1, -1, []]),
        encode_alone(hello(), 0),  # a second handshake
        encode_packet(1, 0, [msgspec.msgpack.encode(delta(1, "x" * MAX_BYTES))]),
    ],
)
def test_what_the_other_end_should_not_have_sent_ends_the_channel_with_a_reason(data: bytes) -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    with pytest.raises(ProtocolError):
        proxy.receive(data, 1.0)
    assert proxy.state is PeerState.ENDED
    assert proxy.receive(data, 1.0) == []
    events = carry(proxy, worker, 1.0)
    assert isinstance(events[0], ChannelLost)
    assert events[0].code == "protocol_error"


@pytest.mark.parametrize(
    "frame",
    [
        Cancel(1),
        Heartbeat(),
        msgspec.structs.replace(WELCOME, protocol=2),
        msgspec.structs.replace(WELCOME, heartbeat_s=0.0),
        msgspec.structs.replace(WELCOME, heartbeat_s=float("nan")),
        msgspec.structs.replace(WELCOME, resumed=True),
        msgspec.structs.replace(WELCOME, received=3),
    ],
)
def test_a_worker_takes_only_a_welcome_that_can_be(frame: Welcome) -> None:
    worker = worker_end()
    worker.connected(0.0)
    with pytest.raises(ProtocolError):
        worker.receive(encode_alone(frame, 0), 0.0)
    assert worker.state is PeerState.ENDED


def test_a_resume_that_forgets_or_invents_packets_is_refused() -> None:
    for received in (0, 3):
        worker, proxy = worker_end(), proxy_end()
        connect(worker, proxy)
        proxy.send(Credit(1, 1), 0.0)
        carry(proxy, worker)
        worker.send(delta(1), 0.0)
        carry(worker, proxy)
        proxy.disconnected(1.0)
        with pytest.raises(ProtocolError):
            proxy.accept(hello(resume="proxy-1", received=received), 2.0)
        assert proxy.state is PeerState.ENDED


def test_a_state_can_only_move_where_it_may() -> None:
    worker = worker_end()
    worker.connected(0.0)
    with pytest.raises(RuntimeError):
        worker.connected(0.0)


def test_a_hello_must_come_first_alone_and_within_bounds() -> None:
    for frames in ([Goodbye("x")], [hello(), hello()], [], [hello(max_streams=0)], [hello(worker_id="x" * 200)]):
        with pytest.raises(ProtocolError):
            read_hello(encode_packet(0, 0, [msgspec.msgpack.encode(frame) for frame in frames]))


def test_the_layout_of_a_packet_is_plain_msgpack() -> None:
    for count in (0, 3, 15, 16, 70_000):
        frames = [msgspec.msgpack.encode(Credit(index, 1)) for index in range(count)]
        packet = msgspec.msgpack.decode(encode_packet(2**40, 7, frames), type=PacketToWorker)
        assert (packet.seq, packet.ack, len(packet.frames)) == (2**40, 7, count)
    assert msgspec.msgpack.decode(encode_alone(None, 5), type=PacketToProxy) == PacketToProxy(0, 5, [])
