"""Reliable ordered delivery of frames over sockets that come and go: one end of it, without I/O and without a clock.

Frames are collected into packets numbered from 1; the other end acknowledges cumulatively; what is not acknowledged is
kept, and sent again on the next socket. A packet is the msgpack array [seq, ack, [frame, …]], one WebSocket message each.
A packet with seq 0 is outside the order (handshake, heartbeat, goodbye, a lone acknowledgement) and is never sent again.

Because a WebSocket keeps order, the next new packet on a socket is always received + 1: a smaller number is a duplicate
and is dropped, a larger one means that a packet is missing, which no retransmission would mend (ProtocolError).
"""

from __future__ import annotations

from collections import deque

import msgspec

from steno.contracts.errors import BadRequest, BodyTooLarge, ProtocolError, TooManyRequests
from steno.contracts.wire.frames import Frame

TARGET_PACKET_BYTES = 64 * 1024
"""A packet is closed when it has grown to this: one decode of it holds the reader's event loop for well under 5 ms."""
HEADER_BYTES = 32
"""Upper bound of what a packet adds to its frames: array headers and two numbers."""

_encode = msgspec.msgpack.Encoder().encode


def encode_packet(seq: int, ack: int, frames: list[bytes]) -> bytes:
    """Encoded frames -> one packet. Written by hand, so that each frame is encoded once, when it is pushed."""
    count = len(frames)
    if count < 16:
        head = bytes((0x90 | count,))
    elif count < 65536:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return b"".join((b"\x93", _encode(seq), _encode(ack), head, *frames))


def encode_alone(frame: Frame | None, ack: int) -> bytes:
    """A packet outside the order, of one frame or none."""
    return encode_packet(0, ack, [] if frame is None else [_encode(frame)])


class Channel:
    """One end's memory: what it has sent and not seen acknowledged, and how far it has received.

    Args:
        max_packet_bytes: what the other end takes in one message; a frame that can't fit is refused by `push`.
    """

    __slots__ = ("_open", "_open_bytes", "_retained", "_transmitted", "_unsent", "acked", "max_packet_bytes", "received",
                 "received_acked", "resent_packets", "retained_bytes", "sent")  # fmt: skip

    def __init__(self, max_packet_bytes: int) -> None:
        self.max_packet_bytes = max_packet_bytes
        self.sent = 0  # number of the last packet closed
        self.acked = 0  # ours, acknowledged by the other end
        self.received = 0  # theirs, taken in order
        self.received_acked = 0  # theirs, acknowledged by us on some socket
        self.retained_bytes = 0
        self.resent_packets = 0
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._retained: deque[bytes] = deque()  # packets acked + 1 … sent
        self._unsent: list[bytes] = []
        self._transmitted = 0

    def push(self, frame: Frame, most_retained: int | None = None) -> None:
        """Queue one frame. Raises, and keeps nothing: BadRequest: nested too deeply, or an integer beyond 64 bits. BodyTooLarge:
        it fits in no packet. most_retained: the bound for `check_room`, which raises, too; None: the caller checks."""
        try:
            data = _encode(frame)
        except (RecursionError, OverflowError) as error:  # of what a client may nest as it likes
            raise BadRequest(f"can't be sent between proxy and worker: {error}") from None
        if len(data) + HEADER_BYTES > self.max_packet_bytes:
            raise BodyTooLarge(
                f"a frame of {len(data)} bytes is too large: a packet has at most {self.max_packet_bytes}"
            )
        if most_retained is not None:
            self.check_room(len(data) + HEADER_BYTES, most_retained)
        if self._open_bytes + len(data) + HEADER_BYTES > self.max_packet_bytes:
            self._close_packet()
        self._open.append(data)
        self._open_bytes += len(data)
        self.retained_bytes += len(data)
        if self._open_bytes >= TARGET_PACKET_BYTES:
            self._close_packet()

    def check_room(self, size: int, most: int) -> None:
        """Check that `size` more bytes may wait to be acknowledged, if at most `most` bytes may wait in all.

        Raises: TooManyRequests: not now. BodyTooLarge: never.
        """
        if size > most:
            raise BodyTooLarge(f"got {size} bytes for a worker at once, at most {most} may wait to be acknowledged")
        if self.retained_bytes + size > most:
            waiting = self.retained_bytes
            raise TooManyRequests(
                f"{waiting} bytes wait to be acknowledged by the worker; {size} more would exceed the limit of {most}"
            )

    def take(self, seq: int, ack: int) -> bool:
        """Note an arriving packet's numbers; whether its frames are new and in order, and so to be handled now.

        Raises:
            ProtocolError: a gap, or an acknowledgement of what was never sent.
        """
        if ack > self.acked:
            if ack > self._transmitted:
                raise ProtocolError(f"got an acknowledgement of packet {ack}, the last one sent is {self._transmitted}")
            self._forget(ack)
        elif ack < 0:
            raise ProtocolError("a negative acknowledgement")
        if seq == self.received + 1:
            self.received = seq
            return True
        if seq > self.received:
            raise ProtocolError(f"packet {seq} came after packet {self.received}")
        if seq < 0:
            raise ProtocolError("a negative sequence number")
        return False

    def packets(self) -> list[bytes]:
        """What is to be written to the present socket, once. Each of them acknowledges what was received by its closing."""
        if self._open:
            self._close_packet()
        packets, self._unsent = self._unsent, []
        self._transmitted = self.sent
        return packets

    def rewind(self, received: int) -> None:
        """Go on on a new socket, at whose other end `received` packets of ours have arrived.

        Raises:
            ProtocolError: it never received that many, or says it lost what it had acknowledged.
        """
        if not self.acked <= received <= self._transmitted:
            raise ProtocolError(f"resumed after packet {received}, must be {self.acked} to {self._transmitted}")
        self._forget(received)
        self._unsent = list(self._retained)
        self.resent_packets += self._transmitted - received
        self.received_acked = self.received  # the handshake says it

    def unacknowledged(self) -> list[bytes]:
        """The packets that the other end has not acknowledged, with what has not been taken from here yet."""
        if self._open:
            self._close_packet()
        return list(self._retained)

    @property
    def last(self) -> int:
        """Number of the packet that the last pushed frame is in."""
        return self.sent + bool(self._open)

    @property
    def wants_write(self) -> bool:
        return bool(self._open or self._unsent)

    @property
    def settled(self) -> bool:
        """Everything that was pushed has been acknowledged."""
        return not self._open and not self._retained

    def _close_packet(self) -> None:
        self.sent += 1
        packet = encode_packet(self.sent, self.received, self._open)
        self.received_acked = self.received
        self._retained.append(packet)
        self._unsent.append(packet)
        self.retained_bytes += len(packet) - self._open_bytes
        self._open = []
        self._open_bytes = 0

    def _forget(self, ack: int) -> None:
        retained = self._retained
        for _ in range(ack - self.acked):
            self.retained_bytes -= len(retained.popleft())
        self.acked = ack
