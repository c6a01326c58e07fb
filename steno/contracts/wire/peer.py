"""The relay protocol as a state machine: bytes and times in, frames and events out. Both ends run it; neither does I/O in it.

A peer is one end of one *channel*: the ordered, acknowledged frames between one start (boot) of a worker and one start of a
proxy, which outlives the sockets that carry it (`channel.py`). The driver, `steno_proxy/workers/hub.py` or
`steno_worker/relay/connection.py`,

    tells it about sockets      connected / accept, disconnected, receive(data, now)
    tells it about time         handle_timeout(now) when next_deadline() has come
    does what it says           writes data_to_send(), closes the socket on `DropSocket`, gives up the streams on `ChannelLost`

and may call `data_to_send` as seldom as once per turn of its event loop: everything sent by then shares packets.

    DOWN --connected--> GREETING --Welcome--> OPEN --disconnected--> DOWN --accept--> OPEN
      \\---------------------any: grace over, protocol error, final Goodbye, overflow--------------------> ENDED

`receive` raises ProtocolError for whatever the other end should not have sent, and nothing else whatever the bytes. The
channel has then ended: a packet that can't be understood would come again on every new socket.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, NamedTuple

import msgspec

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.channel import Channel, encode_alone
from steno.contracts.wire.frames import Frame, Goodbye, Heartbeat
from steno.contracts.wire.packets import (
    CLOSE_GOING_AWAY,
    CLOSE_NORMAL,
    CLOSE_OVERFLOW,
    CLOSE_PROTOCOL_ERROR,
    CLOSE_TIMEOUT,
    PROTOCOL_ERROR,
    PacketT,
    decode_packet,
)

HANDSHAKE_S = 10.0
ACK_DELAY_S = 0.2
"""An acknowledgement waits this long for a packet to ride on; what is retained meanwhile is a fraction of a second's tokens."""
ACK_EVERY_PACKETS = 64
MAX_RETAINED_BYTES = 128 * 1024 * 1024
"""What a channel keeps for a lost socket: 512 streams that each used up a window of 4,096 tokens, at 60 bytes a token."""
EVENTS_SHARE, REQUESTS_SHARE, BULK_SHARE = 1 / 2, 5 / 8, 7 / 8
"""Shares of MAX_RETAINED_BYTES: above the first, a stream's events wait at the worker; the proxy sends requests up to the second,
and bytes of weights up to the third. So none of these ends the channel. The rest is for small frames: credit, cancel, the ends of
streams."""


class PeerState(Enum):
    DOWN = "down"
    GREETING = "greeting"
    OPEN = "open"
    ENDED = "ended"


_MOVES = {
    PeerState.DOWN: {PeerState.GREETING, PeerState.OPEN, PeerState.ENDED},
    PeerState.GREETING: {PeerState.OPEN, PeerState.DOWN, PeerState.ENDED},
    PeerState.OPEN: {PeerState.DOWN, PeerState.ENDED},
    PeerState.ENDED: set[PeerState](),
}


class PeerUp(NamedTuple):
    """The handshake is done. `resumed`: the channel goes on; otherwise it is a new one."""

    resumed: bool


class ChannelLost(NamedTuple):
    """The channel is over, and every stream on it. `code` as in Goodbye."""

    code: str
    reason: str


class DropSocket(NamedTuple):
    """Close the socket with this code; whether the channel goes on is said by `state`."""

    close_code: int
    reason: str


Event = PeerUp | ChannelLost | DropSocket


class Peer(Generic[PacketT]):
    """What both ends share. Use `ProxyPeer` or `WorkerPeer` (`peer_ends.py`).

    Attributes:
        boot_id, remote_boot: of this end and of the other ("" before the first handshake): of a worker's process, of a proxy's
            channel.
        load: what the next heartbeat says of this end; set by the driver.
        remote_load: what the other end's last heartbeat said.
        heard_at: when the last valid packet came.
    """

    _decoder: msgspec.msgpack.Decoder[PacketT]

    def __init__(self, boot_id: str, *, heartbeat_s: float, silence_s: float, grace_s: float,
                 max_packet_bytes: int, max_retained_bytes: int = MAX_RETAINED_BYTES) -> None:  # fmt: skip
        self.boot_id = boot_id
        self.remote_boot = ""
        self.capabilities: frozenset[str] = frozenset()
        self.load = Heartbeat()
        self.remote_load = Heartbeat()
        self.heard_at = 0.0
        self.heartbeat_s = heartbeat_s
        self.silence_s = silence_s
        self.grace_s = grace_s
        self.max_packet_bytes = max_packet_bytes
        self.max_retained_bytes = max_retained_bytes
        self.channel = Channel(max_packet_bytes)
        self._state = PeerState.DOWN
        self._outbox: list[bytes] = []  # packets outside the order, and after the end the last ones
        self._events: list[Event] = []
        self._beat_at = 0.0
        self._ack_at: float | None = None
        self._greeting_until = 0.0
        self._grace_until: float | None = None  # None while connected, or with no channel to lose

    @property
    def state(self) -> PeerState:
        return self._state

    def send(self, frame: Frame, now: float) -> None:
        """Queue a frame for delivery, exactly once and in order. Also while there is no socket; after the end it is dropped.

        Raises BodyTooLarge when it fits in no packet. Over the retention bound, the channel ends (`next_deadline` is then
        in the past, and `handle_timeout` says `ChannelLost`).
        """
        if self._state is PeerState.ENDED:
            return
        channel = self.channel
        channel.push(frame)
        if channel.retained_bytes > self.max_retained_bytes:
            reason = (
                f"{channel.retained_bytes} bytes wait to be acknowledged, at most {self.max_retained_bytes} are allowed"
            )
            self._end("overflow", reason, CLOSE_OVERFLOW, now)

    def offer(self, frame: Frame, share: float, at_least: int = 0) -> None:
        """As `send`, for a frame that can be refused: counted before it is sent, it never ends the channel.

        Args: share: of the retention bound, what may wait to be acknowledged with this frame; REQUESTS_SHARE or BULK_SHARE.
            at_least: bytes that it is known to have, so that it need not be encoded to be refused.
        Raises: BodyTooLarge, BadRequest: no wait can help. TooManyRequests: once more is acknowledged, it can be sent.
        """
        if self._state is PeerState.ENDED:
            return
        most = int(self.max_retained_bytes * share)
        if at_least:
            self.channel.check_room(at_least, most)
        self.channel.push(frame, most)

    def receive(self, data: bytes, now: float) -> list[Frame | Event]:
        """One message from the socket -> the frames and events in it, in order.

        Raises ProtocolError, after which the state is ENDED and the last `data_to_send` says why to the other end.
        """
        if self._state not in (PeerState.OPEN, PeerState.GREETING):
            return []
        try:
            packet = decode_packet(self._decoder, data, self.max_packet_bytes)
            return self._take(packet, now)
        except ProtocolError as error:
            self.fail(error.message, now)
            raise

    def fail(self, reason: str, now: float) -> None:
        """End the channel because the other end broke the protocol, as the driver found in the frames' contents."""
        self._end(PROTOCOL_ERROR, reason, CLOSE_PROTOCOL_ERROR, now)
        self._events.clear()  # the driver knows: it is told by the exception, or it is the one who tells

    def goodbye(self, code: str, message: str, now: float, *, close_code: int = CLOSE_GOING_AWAY) -> None:
        """End the channel from this side; what was sent before still goes out ahead of the Goodbye."""
        self._end(code, message, close_code, now)

    def disconnected(self, now: float) -> None:
        """The socket is gone. Idempotent. The channel waits for the next one until the grace is over."""
        if self._state not in (PeerState.OPEN, PeerState.GREETING):
            return
        was_open = self._state is PeerState.OPEN
        self._move(PeerState.DOWN)
        self._outbox.clear()
        self._ack_at = None
        if was_open:
            self._grace_until = now + (self.grace_s if "resume" in self.capabilities else 0.0)

    def data_to_send(self) -> list[bytes]:
        """Packets to write to the socket, in order. Each call hands them over: unwritten ones are safe in the channel."""
        if self._state is not PeerState.OPEN:
            data, self._outbox = self._outbox, []
            return data
        channel = self.channel
        data = self._outbox + channel.packets()
        self._outbox = []
        if channel.received_acked == channel.received:
            self._ack_at = None
        elif channel.received - channel.received_acked >= ACK_EVERY_PACKETS:
            data.append(self._lone(None))
        return data

    @property
    def wants_write(self) -> bool:
        """Whether `data_to_send` has something now."""
        channel = self.channel
        return bool(self._outbox) or (
            self._state is PeerState.OPEN
            and (channel.wants_write or channel.received - channel.received_acked >= ACK_EVERY_PACKETS)
        )

    def next_deadline(self) -> float | None:
        """When `handle_timeout` is to be called; None: never, as things are."""
        if self._events:
            return 0.0
        if self._state is PeerState.OPEN:
            deadline = min(self._beat_at, self.heard_at + self.silence_s)
            return deadline if self._ack_at is None else min(deadline, self._ack_at)
        if self._state is PeerState.GREETING:
            return self._greeting_until if self._grace_until is None else min(self._greeting_until, self._grace_until)
        return self._grace_until if self._state is PeerState.DOWN else None

    def handle_timeout(self, now: float) -> list[Event]:
        """Do what is due at `now`; safe to call at any time."""
        if self._state is PeerState.OPEN:
            if now >= self.heard_at + self.silence_s:
                self.disconnected(now)
                self._events.append(DropSocket(CLOSE_TIMEOUT, f"silent for {self.silence_s:g} s"))
            elif now >= self._beat_at:
                self._beat_at = now + self.heartbeat_s
                self._outbox.append(self._lone(self.load))
            elif self._ack_at is not None and now >= self._ack_at:
                self._outbox.append(self._lone(None))
        elif self._state is PeerState.GREETING and now >= self._greeting_until:
            self.disconnected(now)
            self._events.append(DropSocket(CLOSE_TIMEOUT, "no Welcome in time"))
        if self._grace_until is not None and now >= self._grace_until and self._state is not PeerState.ENDED:
            self._end("grace_over", f"no socket for {self.grace_s:g} s", CLOSE_TIMEOUT, now)
        events, self._events = self._events, []
        return events

    def _take(self, packet: PacketT, now: float) -> list[Frame | Event]:
        if self._state is PeerState.GREETING:
            return self._greet(packet, now)
        self.heard_at = now
        channel = self.channel
        fresh = channel.take(packet.seq, packet.ack)
        if packet.seq == 0:
            return self._take_unsequenced(packet, now)
        if self._ack_at is None:
            self._ack_at = now + ACK_DELAY_S
        frames: list[Frame | Event] = packet.frames if fresh else []  # type: ignore[assignment]
        return frames

    def _take_unsequenced(self, packet: PacketT, now: float) -> list[Frame | Event]:
        events: list[Frame | Event] = []
        for frame in packet.frames:
            if isinstance(frame, Heartbeat):
                self.remote_load = frame
                events.append(frame)
            elif isinstance(frame, Goodbye):
                if frame.final:
                    self._move(PeerState.ENDED)
                    events.append(ChannelLost(frame.code, frame.message))
                else:
                    self.disconnected(now)
                events.append(DropSocket(CLOSE_NORMAL, frame.code))
                break
            else:
                raise ProtocolError("a second handshake on one socket")
        return events

    def _greet(self, packet: PacketT, now: float) -> list[Frame | Event]:
        raise ProtocolError("a packet before the handshake")

    def _lone(self, frame: Frame | None) -> bytes:
        self._ack_at = None
        self.channel.received_acked = self.channel.received
        return encode_alone(frame, self.channel.received)

    def _open(self, now: float) -> None:
        self._move(PeerState.OPEN)
        self._grace_until = None
        self._ack_at = None
        self.heard_at = now
        self._beat_at = now + self.heartbeat_s

    def _end(self, code: str, reason: str, close_code: int, now: float) -> None:
        if self._state is PeerState.ENDED:
            return
        if self._state is PeerState.OPEN:
            self._outbox += self.channel.packets()
        if self._state in (PeerState.OPEN, PeerState.GREETING):
            # Until Welcome has come, the other end may have begun a new channel, on which it has sent nothing.
            received = self.channel.received if self._state is PeerState.OPEN else 0
            self._outbox.append(encode_alone(Goodbye(code, reason[:200], True), received))
            self._events.append(DropSocket(close_code, code))
        self._events.append(ChannelLost(code, reason))
        self._move(PeerState.ENDED)

    def _move(self, state: PeerState) -> None:
        if state not in _MOVES[self._state]:
            raise RuntimeError(f"invalid change of state: from {self._state.value} to {state.value}")
        self._state = state
