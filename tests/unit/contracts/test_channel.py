"""What one end of a channel keeps, sends again and believes, packet by packet."""

from __future__ import annotations

import msgspec
import pytest

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.channel import Channel
from steno.contracts.wire.frames import Cancel


def numbers(packets: list[bytes]) -> list[int]:
    return [msgspec.msgpack.decode(packet)[0] for packet in packets]


def sending(packets: int) -> Channel:
    """A channel of which so many packets have been written."""
    channel = Channel(2**20)
    for number in range(packets):
        channel.push(Cancel(number, "x"))
        channel.packets()
    return channel


def test_on_a_new_socket_each_packet_that_is_missing_is_sent_once_and_in_order() -> None:
    channel = sending(3)
    channel.push(Cancel(3, "x"))
    channel.unacknowledged()  # closes the fourth, which the lost socket has not taken
    channel.rewind(1)
    assert numbers(channel.packets()) == [2, 3, 4]
    assert channel.resent_packets == 2 and numbers(channel.unacknowledged()) == [2, 3, 4]


def test_what_has_arrived_is_kept_no_longer() -> None:
    channel = sending(3)
    channel.rewind(3)
    assert channel.packets() == [] and channel.settled and channel.retained_bytes == 0


def test_what_has_not_left_can_not_have_arrived() -> None:
    channel = sending(2)
    channel.push(Cancel(2, "x"))
    channel.unacknowledged()
    for acknowledge in (lambda: channel.take(0, 3), lambda: channel.rewind(3)):
        with pytest.raises(ProtocolError):
            acknowledge()
    channel.packets()
    assert not channel.take(0, 3) and channel.settled
