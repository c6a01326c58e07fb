"""Sends the frames of one channel's generations and updates, as long as that channel is the current one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.frames import Delta, Frame
from steno.contracts.wire.packets import TO_PROXY, decode_packet
from steno.contracts.wire.peer import EVENTS_SHARE, PeerState
from steno.contracts.wire.peer_ends import WorkerPeer

logger = logging.getLogger(__name__)


class ChannelOutlet:
    """Sends the frames of one channel's generations and updates. Once that channel is over, or another one has taken its place,
    what they still send is dropped: on the next one their stream numbers would be another turn's (I9).

    Args: send: queues a frame on the peer's channel. dropped: told of sampled tokens that were said too late.
    """

    def __init__(self, peer: WorkerPeer, *, send: Callable[[Frame], None], dropped: Callable[[Delta], None]) -> None:
        self.channel = peer.channel
        self._peer = peer
        self._send = send
        self._dropped = dropped
        self._most = int(peer.max_retained_bytes * EVENTS_SHARE)
        self._acknowledged = asyncio.Event()

    @property
    def full(self) -> bool:
        return self.channel.retained_bytes >= self._most

    def __call__(self, frame: Frame) -> None:
        """Raises BodyTooLarge: it fits in no packet."""
        peer = self._peer
        if peer.channel is self.channel and peer.state is not PeerState.ENDED:
            self._send(frame)
        elif type(frame) is Delta:
            self._dropped(frame)

    def unacknowledged_tokens(self) -> int:
        """Sampled tokens in the packets that the proxy has not acknowledged. One that does not decode is left out: it may be why
        the channel is lost."""
        tokens = 0
        for packet in self.channel.unacknowledged():
            try:
                frames = decode_packet(TO_PROXY, packet, len(packet)).frames
            except ProtocolError as error:
                logger.error("a packet that this worker made does not decode: %s", error.message)
                continue
            tokens += sum(len(frame.ids) >> 2 for frame in frames if isinstance(frame, Delta))
        return tokens

    async def room(self) -> None:
        """Wait until more has been acknowledged. Cancel-safe."""
        self._acknowledged.clear()
        await self._acknowledged.wait()

    def acknowledged(self) -> None:
        """The proxy may have acknowledged more: wakes `room`."""
        self._acknowledged.set()
