"""Packets and the words around them: what may be in a message each way, how it is read, close codes and limits.

Each direction has its own decoder, so that a frame sent the wrong way, an unknown frame and a malformed one are the same
thing: a packet that does not decode. Meaning and order are `peer.py` and `channel.py`.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from steno.contracts.errors import ProtocolError
from steno.contracts.wire.channel import TARGET_PACKET_BYTES, encode_alone
from steno.contracts.wire.frames import (
    Abandon,
    Announce,
    Apply,
    Cancel,
    Chunk,
    Count,
    Counted,
    Credit,
    Delta,
    Failed,
    Finish,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Prepare,
    Progress,
    Started,
    Welcome,
)

MAX_HELLO_BYTES = 256 * 1024

CLOSE_NORMAL = 1000
CLOSE_GOING_AWAY = 1001
CLOSE_PROTOCOL_ERROR = 4400
CLOSE_UNAUTHORIZED = 4401
CLOSE_VERSION = 4406
CLOSE_TIMEOUT = 4408
CLOSE_REPLACED = 4409
CLOSE_OVERFLOW = 4413
"""WebSocket close codes; a Goodbye with the word for it comes before, wherever the socket still takes one."""

PROTOCOL_ERROR = "protocol_error"
UNAUTHORIZED = "unauthorized"
VERSION = "version"
REPLACED = "replaced"
NAME_TAKEN = "name_taken"
"""Of a new boot while another one that answers has its worker_id. No refusal: the name may be free when it dials again."""
REFUSALS = frozenset({UNAUTHORIZED, VERSION, REPLACED})
"""Goodbye codes after which dialling again can't help."""


ToProxy = Hello | Goodbye | Heartbeat | Started | Delta | Finish | Failed | Counted | Progress | Announce
ToWorker = Welcome | Goodbye | Heartbeat | Generate | Cancel | Credit | Count | Prepare | Chunk | Apply | Abandon
_UNSEQUENCED = frozenset({Hello, Welcome, Goodbye, Heartbeat})


MAX_FRAMES = TARGET_PACKET_BYTES // 2
"""In one packet: a frame is two bytes and more, and a packet is closed at TARGET_PACKET_BYTES."""


class PacketToProxy(msgspec.Struct, array_like=True):
    seq: int
    ack: int
    frames: Annotated[list[ToProxy], Meta(max_length=MAX_FRAMES)]


class PacketToWorker(msgspec.Struct, array_like=True):
    seq: int
    ack: int
    frames: list[ToWorker]


PacketT = TypeVar("PacketT", PacketToProxy, PacketToWorker)


def decode_packet(decoder: msgspec.msgpack.Decoder[PacketT], data: bytes, max_bytes: int) -> PacketT:
    """One message -> packet. Direction, frame tags and field types are checked here. Raises ProtocolError."""
    if len(data) > max_bytes:
        raise ProtocolError(f"a packet of {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        packet = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a packet: {type(error).__name__}: {str(error)[:120]}") from None
    if packet.seq == 0:
        if not _UNSEQUENCED.issuperset(map(type, packet.frames)):
            raise ProtocolError("a packet without a sequence number has a frame that needs one")
    elif not _UNSEQUENCED.isdisjoint(map(type, packet.frames)):
        raise ProtocolError("a packet with a sequence number has a frame that must not have one")
    return packet


TO_PROXY = msgspec.msgpack.Decoder(PacketToProxy)
TO_WORKER = msgspec.msgpack.Decoder(PacketToWorker)


def read_hello(data: bytes) -> Hello:
    """The first message of a worker's socket, before it is known whose it is. Raises ProtocolError."""
    packet = decode_packet(TO_PROXY, data, MAX_HELLO_BYTES)
    if packet.seq != 0 or len(packet.frames) != 1 or not isinstance(hello := packet.frames[0], Hello):
        raise ProtocolError("the first packet of a worker must be Hello, alone")
    if not 1 <= len(hello.worker_id) <= 128 or not 1 <= len(hello.boot_id) <= 64:
        raise ProtocolError("Hello: worker_id or boot_id is out of bounds")
    return hello


def farewell(code: str, message: str, *, final: bool = True) -> bytes:
    """A packet with Goodbye, for sockets that never got a channel."""
    return encode_alone(Goodbye(code, message, final), 0)
