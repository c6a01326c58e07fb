"""The two ends of the relay protocol: `Peer` with the handshake of a proxy and of a worker."""

from __future__ import annotations

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.channel import Channel, encode_alone
from steno.contracts.wire.frames import PROTOCOL_VERSION, Frame, Goodbye, Hello, Welcome
from steno.contracts.wire.packets import (
    CLOSE_NORMAL,
    PROTOCOL_ERROR,
    TO_PROXY,
    TO_WORKER,
    VERSION,
    PacketToProxy,
    PacketToWorker,
    farewell,
)
from steno.contracts.wire.peer import (
    HANDSHAKE_S,
    MAX_RETAINED_BYTES,
    ChannelLost,
    DropSocket,
    Event,
    Peer,
    PeerState,
    PeerUp,
)

CAPABILITIES = frozenset({"count", "policy_updates", "resume"})
"""Optional parts of the protocol that this end knows; in effect is what both ends named.
`count`: prompts can be counted without being run. `policy_updates`: the worker takes new weights. `resume`: the channel outlives
its socket."""


class ProxyPeer(Peer[PacketToProxy]):
    """The proxy's end: one per channel. `accept` takes the Hello of its first and of each later socket.

    Args: boot_id: of this channel alone: a worker names the channel that it comes back to by it.
    """

    _decoder = TO_PROXY

    def __init__(self, boot_id: str, proxy_id: str, *, heartbeat_s: float, silence_s: float, grace_s: float,
                 max_packet_bytes: int, max_retained_bytes: int = MAX_RETAINED_BYTES) -> None:  # fmt: skip
        super().__init__(boot_id, heartbeat_s=heartbeat_s, silence_s=silence_s, grace_s=grace_s,
                         max_packet_bytes=max_packet_bytes, max_retained_bytes=max_retained_bytes)  # fmt: skip
        self.proxy_id = proxy_id

    def goes_on(self, hello: Hello) -> bool:
        """Whether this Hello comes back to this channel, rather than asking for a new one.

        A worker that never saw our Welcome asks for a new one, or for the one before; if nothing has passed, this one *is* new
        to it.
        """
        if self._state is PeerState.ENDED or hello.boot_id != self.remote_boot:
            return False
        untouched = self.channel.received == 0 and self.channel.acked == 0
        return hello.resume == self.boot_id or untouched

    def accept(self, hello: Hello, now: float) -> PeerUp:
        """A socket with a worker's Hello is there; Welcome goes out first.

        Call `disconnected` first if an older socket is still there. Raises ProtocolError (no common version: code `version`).
        """
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            message = f"speaks protocol {hello.protocol_min} to {hello.protocol_max}, this proxy {PROTOCOL_VERSION}"
            self._move(PeerState.ENDED)
            self._outbox.append(farewell(VERSION, message))
            raise ProtocolError(message, field=VERSION)
        resumed = bool(hello.resume) and hello.resume == self.boot_id and hello.boot_id == self.remote_boot
        self.remote_boot = hello.boot_id
        self.capabilities = CAPABILITIES.intersection(hello.capabilities)
        try:
            self.channel.rewind(hello.received if resumed else 0)
        except ProtocolError as error:
            self._move(PeerState.ENDED)
            self._outbox.append(farewell(PROTOCOL_ERROR, error.message))
            raise
        if hello.max_packet_bytes:
            self.channel.max_packet_bytes = min(self.max_packet_bytes, hello.max_packet_bytes)
        self._open(now)
        welcome = Welcome(PROTOCOL_VERSION, self.proxy_id, self.boot_id, resumed, self.channel.received, self.heartbeat_s,
                          self.grace_s, self.max_packet_bytes, [], sorted(self.capabilities))  # fmt: skip
        self._outbox.append(encode_alone(welcome, 0))
        return PeerUp(resumed)


class WorkerPeer(Peer[PacketToWorker]):
    """The worker's end, for one proxy. `hello` is what it says of itself; the driver may replace it between sockets.

    Args:
        grace_s: how long generations go on without a socket; None: as long as the proxy says.
    """

    _decoder = TO_WORKER

    def __init__(self, hello: Hello, *, grace_s: float | None = None, max_packet_bytes: int,
                 max_retained_bytes: int = MAX_RETAINED_BYTES) -> None:  # fmt: skip
        super().__init__(hello.boot_id, heartbeat_s=5.0, silence_s=20.0, grace_s=grace_s or 30.0,
                         max_packet_bytes=max_packet_bytes, max_retained_bytes=max_retained_bytes)  # fmt: skip
        self.hello = hello
        self._own_grace_s = grace_s

    def connected(self, now: float) -> None:
        """A socket to the proxy is there: Hello goes out."""
        self._move(PeerState.GREETING)
        self._greeting_until = now + HANDSHAKE_S
        self.hello.resume = self.remote_boot
        self.hello.received = self.channel.received
        self.hello.max_packet_bytes = self.max_packet_bytes
        self.hello.capabilities = sorted(CAPABILITIES)
        self.hello.protocol_min = self.hello.protocol_max = PROTOCOL_VERSION
        self._outbox.append(encode_alone(self.hello, 0))

    def _greet(self, packet: PacketToWorker, now: float) -> list[Frame | Event]:
        if packet.seq != 0 or len(packet.frames) != 1:
            raise ProtocolError("the first packet of a proxy must be Welcome or Goodbye, alone")
        welcome = packet.frames[0]
        if isinstance(welcome, Goodbye):
            if self.remote_boot and not welcome.final:
                self.disconnected(now)
                return [DropSocket(CLOSE_NORMAL, welcome.code)]
            self._move(PeerState.ENDED)
            return [ChannelLost(welcome.code, welcome.message), DropSocket(CLOSE_NORMAL, welcome.code)]
        if not isinstance(welcome, Welcome):
            raise ProtocolError("the first packet of a proxy must be Welcome or Goodbye, alone")
        in_bounds = 0.01 <= welcome.heartbeat_s <= 3600 and welcome.grace_s >= 0 and welcome.max_packet_bytes >= 1024
        if welcome.protocol != PROTOCOL_VERSION or not in_bounds:
            raise ProtocolError("Welcome: protocol, heartbeat_s, grace_s or max_packet_bytes is out of bounds")
        if welcome.resumed and (not self.remote_boot or welcome.boot_id != self.remote_boot):
            raise ProtocolError("Welcome resumes an unknown channel")
        events: list[Frame | Event] = []
        if not welcome.resumed and self.remote_boot:
            events.append(ChannelLost("forgotten", "the proxy no longer has this channel"))
            self.channel = Channel(self.max_packet_bytes)
        self.channel.rewind(welcome.received)
        self.channel.max_packet_bytes = min(self.max_packet_bytes, welcome.max_packet_bytes)
        self.remote_boot = welcome.boot_id
        self.capabilities = CAPABILITIES.intersection(welcome.capabilities)
        self.heartbeat_s = welcome.heartbeat_s
        self.silence_s = 4 * welcome.heartbeat_s
        self.grace_s = welcome.grace_s if self._own_grace_s is None else self._own_grace_s
        self._open(now)
        return [*events, PeerUp(welcome.resumed)]
