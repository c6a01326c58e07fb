"""The relay protocol as data: handshakes, resumes, deadlines, limits. No socket, no clock."""

from __future__ import annotations

import msgspec
import pytest

from steno.contracts.chat import Job
from steno.contracts.errors import BodyTooLarge, TooManyRequests
from steno.contracts.wire.channel import TARGET_PACKET_BYTES
from steno.contracts.wire.frames import (
    Cancel,
    Chunk,
    Credit,
    Delta,
    Generate,
    Heartbeat,
    Hello,
    ModelCard,
)
from steno.contracts.wire.packets import read_hello
from steno.contracts.wire.peer import (
    ACK_DELAY_S,
    ACK_EVERY_PACKETS,
    BULK_SHARE,
    HANDSHAKE_S,
    REQUESTS_SHARE,
    ChannelLost,
    DropSocket,
    PeerState,
    PeerUp,
)
from steno.contracts.wire.peer_ends import ProxyPeer, WorkerPeer

MAX_BYTES = 1 << 20


def hello(boot: str = "worker-1", **fields: object) -> Hello:
    return msgspec.structs.replace(Hello(1, 1, "w", boot, [ModelCard("m", 100)], 4), **fields)


def worker_end(boot: str = "worker-1", **fields: object) -> WorkerPeer:
    return WorkerPeer(hello(boot), max_packet_bytes=MAX_BYTES, **fields)  # type: ignore[arg-type]


def proxy_end(boot: str = "proxy-1", **fields: object) -> ProxyPeer:
    given = {"heartbeat_s": 5.0, "silence_s": 20.0, "grace_s": 30.0, "max_packet_bytes": MAX_BYTES} | fields
    return ProxyPeer(boot, "p", **given)  # type: ignore[arg-type]


def delta(number: int, text: str = "") -> Delta:
    return Delta(number, b"\1\0\0\0", b"\0\0\0\0", "base/0", text)


def connect(worker: WorkerPeer, proxy: ProxyPeer, now: float = 0.0) -> list[object]:
    """A new socket, handshake included. Returns the worker's events."""
    worker.connected(now)
    (greeting,) = worker.data_to_send()
    proxy.accept(read_hello(greeting), now)
    return [event for data in proxy.data_to_send() for event in worker.receive(data, now)]


def carry(sender: WorkerPeer | ProxyPeer, receiver: WorkerPeer | ProxyPeer, now: float = 0.0) -> list[object]:
    return [event for data in sender.data_to_send() for event in receiver.receive(data, now)]


def test_a_handshake_agrees_on_what_both_know() -> None:
    worker, proxy = worker_end(), proxy_end()
    assert connect(worker, proxy) == [PeerUp(resumed=False)]
    assert (worker.state, proxy.state) == (PeerState.OPEN, PeerState.OPEN)
    assert (worker.heartbeat_s, worker.grace_s, worker.remote_boot) == (5.0, 30.0, "proxy-1")
    assert worker.capabilities == proxy.capabilities == {"count", "policy_updates", "resume"}


def test_frames_of_one_turn_share_a_packet_and_arrive_in_order() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    for number in range(100):
        worker.send(delta(number), 0.0)
    packets = worker.data_to_send()
    assert len(packets) == 1
    assert proxy.receive(packets[0], 0.0) == [delta(number) for number in range(100)]
    assert worker.data_to_send() == []


def test_a_lost_socket_loses_nothing_and_doubles_nothing() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    worker.send(delta(1), 0.0)
    carry(worker, proxy)
    worker.send(delta(2), 0.0)
    worker.data_to_send()  # written, and lost on the way
    worker.disconnected(1.0)
    proxy.disconnected(1.0)
    worker.send(delta(3), 2.0)
    proxy.send(Cancel(9), 2.0)
    assert connect(worker, proxy, 3.0) == [PeerUp(resumed=True), Cancel(9)]
    assert carry(worker, proxy, 3.0) == [delta(2), delta(3)]
    assert worker.channel.resent_packets == 1


def test_what_arrived_before_the_cut_is_not_handled_again() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    worker.send(delta(1), 0.0)
    (packet,) = worker.data_to_send()
    assert proxy.receive(packet, 0.0) == [delta(1)]
    assert proxy.receive(packet, 0.0) == []


def test_an_acknowledgement_rides_on_a_packet_or_goes_alone_when_due() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    worker.send(delta(1), 0.0)
    carry(worker, proxy)
    assert proxy.next_deadline() == ACK_DELAY_S
    proxy.send(Credit(1, 1), 0.1)
    carry(proxy, worker, 0.1)
    assert worker.channel.settled
    worker.send(delta(2), 0.1)
    carry(worker, proxy, 0.1)
    assert proxy.handle_timeout(0.1 + ACK_DELAY_S) == []
    carry(proxy, worker, 0.3)
    assert worker.channel.settled
    for _ in range(ACK_EVERY_PACKETS):
        worker.send(delta(3), 0.4)
        carry(worker, proxy, 0.4)
    assert proxy.wants_write
    carry(proxy, worker, 0.4)
    assert worker.channel.settled


def test_a_restarted_proxy_is_a_new_channel_and_the_worker_is_told() -> None:
    worker, successor = worker_end(), proxy_end("proxy-2")
    connect(worker, proxy_end())
    worker.send(delta(1), 0.0)
    worker.disconnected(1.0)
    events = connect(worker, successor, 2.0)
    assert [type(event) for event in events] == [ChannelLost, PeerUp]
    worker.send(delta(2), 2.0)
    assert carry(worker, successor, 2.0) == [delta(2)]  # nothing of the old channel goes to the new proxy


def test_a_restarted_worker_asks_for_a_new_channel() -> None:
    proxy = proxy_end()
    connect(worker_end("worker-1"), proxy)
    assert not proxy.goes_on(hello("worker-2"))
    assert not proxy.goes_on(hello("worker-2", resume="proxy-1"))
    assert proxy.goes_on(hello("worker-1", resume="proxy-1"))


def hello_again(worker: WorkerPeer, proxy: ProxyPeer, sent: Cancel, now: float) -> Hello:
    """After a socket that was lost with the Welcome on it, and with a frame that the proxy had sent."""
    worker.connected(now)
    proxy.accept(read_hello(worker.data_to_send()[0]), now)
    proxy.send(sent, now)
    proxy.data_to_send()
    proxy.disconnected(now)
    worker.disconnected(now)
    worker.connected(now)
    return read_hello(worker.data_to_send()[0])


def test_a_worker_that_never_saw_the_welcome_takes_up_the_untouched_channel() -> None:
    worker, proxy = worker_end(), proxy_end()
    greeting = hello_again(worker, proxy, Cancel(1), 1.0)
    assert proxy.goes_on(greeting)
    assert proxy.accept(greeting, 2.0) == PeerUp(resumed=False)
    assert carry(proxy, worker, 2.0) == [PeerUp(resumed=False), Cancel(1)]


def test_a_worker_that_never_saw_the_welcome_of_its_second_channel_does_not_go_on_with_the_first() -> None:
    worker, first, second = worker_end(), proxy_end(), proxy_end("proxy-1, channel 2")
    connect(worker, first)
    first.send(Cancel(1), 0.0)
    assert carry(first, worker, 0.0) == [Cancel(1)]
    worker.disconnected(1.0)
    greeting = hello_again(worker, second, Cancel(2), 2.0)
    assert (greeting.resume, greeting.received) == ("proxy-1", 1)
    assert second.goes_on(greeting), "nothing has passed on it"
    assert second.accept(greeting, 4.0) == PeerUp(resumed=False)
    events = carry(second, worker, 4.0)
    assert [type(event) for event in events] == [ChannelLost, PeerUp, Cancel] and events[-1] == Cancel(2)


def test_heartbeats_carry_load_both_ways_and_keep_the_socket() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    worker.load = Heartbeat(3, 1, 0.5)
    for now in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert worker.handle_timeout(now) == [] == proxy.handle_timeout(now)
        assert carry(worker, proxy, now) == [Heartbeat(3, 1, 0.5)]
        assert carry(proxy, worker, now) == [Heartbeat()]
    assert proxy.remote_load == Heartbeat(3, 1, 0.5)


def test_a_silent_socket_is_dropped_and_after_the_grace_the_channel_is_lost() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    assert proxy.handle_timeout(19.9) == []
    (event,) = proxy.handle_timeout(20.0)
    assert isinstance(event, DropSocket)
    assert proxy.state is PeerState.DOWN
    assert proxy.next_deadline() == 50.0
    assert proxy.handle_timeout(49.9) == []
    (lost,) = proxy.handle_timeout(50.0)
    assert isinstance(lost, ChannelLost)
    assert lost.code == "grace_over"
    assert proxy.state is PeerState.ENDED
    assert proxy.next_deadline() is None


def test_a_worker_that_gives_up_before_welcome_breaks_no_protocol_at_a_proxy_that_gave_up_first() -> None:
    worker, forgotten = worker_end(grace_s=4.0), proxy_end("proxy-1")
    connect(worker, forgotten)
    forgotten.send(Credit(1, 1), 0.0)
    carry(forgotten, worker)
    worker.disconnected(1.0)
    worker.connected(4.9)
    (greeting,) = worker.data_to_send()
    assert ChannelLost("grace_over", "no socket for 4 s") in worker.handle_timeout(5.0)
    new = proxy_end("proxy-2")
    new.accept(read_hello(greeting), 5.1)
    (last,) = worker.data_to_send()
    assert [type(event) for event in new.receive(last, 5.2)] == [ChannelLost, DropSocket]


def test_a_proxy_that_does_not_answer_is_left() -> None:
    worker = worker_end()
    worker.connected(1.0)
    assert worker.next_deadline() == 1.0 + HANDSHAKE_S
    (event,) = worker.handle_timeout(1.0 + HANDSHAKE_S)
    assert isinstance(event, DropSocket)
    assert worker.state is PeerState.DOWN
    assert worker.next_deadline() is None  # no channel yet, so none to lose


def test_a_channel_that_is_up_again_outlives_the_grace_that_had_begun() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    for end in (worker, proxy):
        end.disconnected(1.0)
    assert connect(worker, proxy, 2.0) == [PeerUp(resumed=True)]
    for now in range(5, 90, 5):  # a heartbeat each time; the grace would be over after 31 s
        for end in (worker, proxy):
            assert end.handle_timeout(float(now)) == []
        carry(worker, proxy, float(now))
        carry(proxy, worker, float(now))
    assert (worker.state, proxy.state) == (PeerState.OPEN, PeerState.OPEN)


def test_grace_counts_from_the_loss_also_while_greeting_again() -> None:
    worker, proxy = worker_end(grace_s=4.0), proxy_end()
    connect(worker, proxy)
    worker.disconnected(1.0)
    worker.connected(3.0)
    assert worker.next_deadline() == 5.0
    assert ChannelLost("grace_over", "no socket for 4 s") in worker.handle_timeout(5.0)


def test_without_resume_the_channel_ends_with_its_socket() -> None:
    proxy = proxy_end()
    proxy.accept(hello(capabilities=[]), 0.0)
    proxy.disconnected(1.0)
    assert isinstance(proxy.handle_timeout(1.0)[0], ChannelLost)


def test_retention_is_bounded_and_overflow_ends_the_channel_with_a_reason() -> None:
    worker, proxy = worker_end(max_retained_bytes=10_000), proxy_end()
    connect(worker, proxy)
    worker.disconnected(0.0)
    for _ in range(100):
        worker.send(delta(1, "x" * 200), 1.0)
    assert worker.state is PeerState.ENDED
    assert worker.next_deadline() == 0.0
    (lost,) = worker.handle_timeout(1.0)
    assert isinstance(lost, ChannelLost)
    assert lost.code == "overflow"


def test_what_is_offered_is_counted_before_it_is_sent_and_never_ends_the_channel() -> None:
    worker, proxy = worker_end(), proxy_end(max_retained_bytes=8000)
    connect(worker, proxy)
    request, chunk = Generate(1, "t", 0, "trial", Job(prompt_text="x" * 2000)), Chunk("u", "s", 0, b"x" * 1900, 0)
    proxy.offer(request, REQUESTS_SHARE)
    proxy.offer(request, REQUESTS_SHARE)
    for known in (0, 2000):
        with pytest.raises(TooManyRequests, match="wait to be acknowledged"):
            proxy.offer(request, REQUESTS_SHARE, known)
    proxy.offer(chunk, BULK_SHARE)
    with pytest.raises(TooManyRequests):
        proxy.offer(chunk, BULK_SHARE)
    for share, known in ((REQUESTS_SHARE, 0), (REQUESTS_SHARE, 6000)):
        with pytest.raises(BodyTooLarge, match="5000 may wait"):
            proxy.offer(Generate(2, "t", 0, "trial", Job(prompt_text="x" * 6000)), share, known)
    proxy.send(Cancel(1), 0.0)
    assert proxy.state is PeerState.OPEN and len(carry(proxy, worker)) == 4
    carry_acks(worker, proxy)
    proxy.offer(request, REQUESTS_SHARE)


def carry_acks(receiver: WorkerPeer, sender: ProxyPeer) -> None:
    assert receiver.handle_timeout(ACK_DELAY_S) == []
    carry(receiver, sender)


def test_a_worker_says_how_large_a_packet_may_be_and_an_older_one_does_not() -> None:
    for most, fits in ((1024, False), (MAX_BYTES * 4, True), (0, True)):
        proxy = proxy_end()
        proxy.accept(hello(max_packet_bytes=most), 0.0)
        request = Generate(1, "t", 0, "trial", Job(prompt_text="x" * 2000))
        if fits:
            proxy.offer(request, REQUESTS_SHARE)
        else:
            with pytest.raises(BodyTooLarge, match="a packet has at most 1024"):
                proxy.offer(request, REQUESTS_SHARE)


def test_retained_bytes_are_given_back_by_acknowledgements() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    for now in range(3):
        for _ in range(50):
            worker.send(delta(1, "x" * 3000), now)
        carry(worker, proxy, now)
        proxy.handle_timeout(now + ACK_DELAY_S)
        carry(proxy, worker, now)
    assert worker.channel.retained_bytes == 0


def test_large_backlogs_go_in_packets_of_bounded_size_and_a_frame_too_large_is_refused() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    for number in range(1000):
        worker.send(delta(number, "x" * 500), 0.0)
    packets = worker.data_to_send()
    assert len(packets) > 5
    assert max(map(len, packets)) < TARGET_PACKET_BYTES + 1000
    with pytest.raises(BodyTooLarge):
        worker.send(delta(1, "x" * MAX_BYTES), 0.0)
    assert worker.state is PeerState.OPEN


def test_a_final_goodbye_ends_the_channel_after_what_was_sent_before_it() -> None:
    worker, proxy = worker_end(), proxy_end()
    connect(worker, proxy)
    worker.send(delta(1), 0.0)
    worker.goodbye("stopping", "told to stop", 0.0)
    events = carry(worker, proxy)
    assert events[0] == delta(1)
    assert events[1] == ChannelLost("stopping", "told to stop")
    assert proxy.state is PeerState.ENDED
    worker.send(delta(2), 0.0)
    assert worker.data_to_send() == []
