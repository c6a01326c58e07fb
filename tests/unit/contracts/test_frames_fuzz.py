"""Hypothesis over the relay: any network, and any bytes."""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steno.contracts.errors import ProtocolError
from steno.contracts.wire import frames
from steno.contracts.wire.channel import encode_alone, encode_packet
from steno.contracts.wire.frames import Credit, Delta, Heartbeat, Hello, ModelCard
from steno.contracts.wire.packets import read_hello
from steno.contracts.wire.peer import PeerState
from steno.contracts.wire.peer_ends import ProxyPeer, WorkerPeer


class Network:
    """A worker and a proxy with sockets that are cut wherever the script says. Each socket keeps order, as TCP does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worker = WorkerPeer(Hello(1, 1, "w", "boot-w", [ModelCard("m", 9)], 1), max_packet_bytes=4096)
        self.proxy = ProxyPeer("boot-p", "p", heartbeat_s=5, silence_s=1e9, grace_s=1e9, max_packet_bytes=4096)
        self.to_proxy: deque[bytes] = deque()
        self.to_worker: deque[bytes] = deque()
        self.sent: dict[str, list[int]] = {"worker": [], "proxy": []}
        self.got: dict[str, list[int]] = {"worker": [], "proxy": []}

    def connect(self) -> None:
        if self.worker.state is PeerState.DOWN:
            self.worker.connected(self.now)

    def cut(self) -> None:
        self.worker.disconnected(self.now)
        self.proxy.disconnected(self.now)
        self.to_proxy.clear()
        self.to_worker.clear()

    def send(self, end: str) -> None:
        number = len(self.sent[end]) + 1
        self.sent[end].append(number)
        if end == "worker":
            self.worker.send(Delta(number, b"", b"", "", "x" * (number % 7 * 300)), self.now)
        else:
            self.proxy.send(Credit(number, 1), self.now)

    def write(self) -> None:
        self.to_proxy += self.worker.data_to_send()
        self.to_worker += self.proxy.data_to_send()

    def deliver(self, end: str) -> None:
        """One message, if one is on the way."""
        if end == "proxy" and self.to_proxy:
            data = self.to_proxy.popleft()
            if self.proxy.state is PeerState.OPEN:
                events = self.proxy.receive(data, self.now)
                self.got["proxy"] += [event.stream for event in events if isinstance(event, Delta)]
            else:
                hello = read_hello(data)
                assert self.proxy.goes_on(hello) or not self.proxy.remote_boot
                self.proxy.accept(hello, self.now)
        elif end == "worker" and self.to_worker:
            events = self.worker.receive(self.to_worker.popleft(), self.now)
            self.got["worker"] += [event.stream for event in events if isinstance(event, Credit)]

    def tick(self, seconds: float = 0.3) -> None:
        self.now += seconds
        for peer in (self.worker, self.proxy):
            for event in peer.handle_timeout(self.now):
                assert type(event).__name__ == "DropSocket", event
                self.cut()

    def settle(self) -> None:
        for _ in range(400):
            self.connect()
            self.write()
            self.deliver("proxy")
            self.deliver("worker")
            self.tick(0.05)


STEPS = st.sampled_from(
    ["connect", "cut", "send worker", "send proxy", "write", "write", "deliver proxy", "deliver proxy", "deliver worker",
     "deliver worker", "tick"]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=120))
@example(["connect", "write", "deliver proxy", "send proxy", "write", "cut", "connect", "write", "deliver proxy"])
def test_every_frame_arrives_once_and_in_order_whatever_the_network_does(steps: list[str]) -> None:
    network = Network()
    network.worker._own_grace_s = 1e9  # the proxy's own bound is in Welcome; here nothing is ever given up
    for step in steps:
        word, _, end = step.partition(" ")
        if end:
            getattr(network, word)(end)
        else:
            getattr(network, word)()
        assert network.got["proxy"] == network.sent["worker"][: len(network.got["proxy"])]
        assert network.got["worker"] == network.sent["proxy"][: len(network.got["worker"])]
    network.settle()
    assert network.got == {"proxy": network.sent["worker"], "worker": network.sent["proxy"]}
    assert network.worker.channel.settled
    assert network.proxy.channel.settled


def _open_pair() -> tuple[WorkerPeer, ProxyPeer]:
    network = Network()
    network.connect()
    for _ in range(4):
        network.write()
        network.deliver("proxy")
        network.deliver("worker")
    assert network.worker.state is network.proxy.state is PeerState.OPEN
    return network.worker, network.proxy


def _feed(peer: WorkerPeer | ProxyPeer, data: bytes) -> None:
    try:
        peer.receive(data, 0.0)
    except ProtocolError:
        assert peer.state is PeerState.ENDED


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_error(data: bytes) -> None:
    for peer in _open_pair():
        _feed(peer, data)
    fresh = Network()
    fresh.connect()
    _feed(fresh.worker, data)
    with contextlib.suppress(ProtocolError):
        read_hello(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
TAGS = st.sampled_from(
    "hello welcome bye beat gen cancel credit count prep chunk apply abandon started d fin failed counted progress "
    "announce".split()
)
FRAMES = st.tuples(TAGS, st.lists(VALUES, max_size=8)).map(lambda pair: [pair[0], *pair[1]])


@settings(max_examples=300)
@given(st.integers(-2, 3), st.integers(-2, 3), st.lists(FRAMES, max_size=4))
def test_packets_of_well_tagged_nonsense_raise_nothing_but_protocol_error(
    seq: int, ack: int, nonsense: list[object]
) -> None:
    data = msgspec.msgpack.encode([seq, ack, nonsense])
    for peer in _open_pair():
        _feed(peer, data)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_packet_harms_its_own_channel_only(data: st.DataObject) -> None:
    worker, proxy = _open_pair()
    whole = encode_packet(1, 0, [msgspec.msgpack.encode(Delta(1, b"\1\0\0\0", b"\0\0\0\0", "base/0", "héllo"))])
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    _feed(proxy, bytes(damaged)[: data.draw(st.integers(0, len(whole)))])
    _feed(worker, encode_alone(Heartbeat(), 0))
    assert worker.state is PeerState.OPEN


def test_every_frame_is_a_tagged_array() -> None:
    for kind in frames.Frame.__args__:
        assert kind.__struct_config__.array_like, kind
        assert kind.__struct_config__.tag, kind
