"""What a socket may send before its key is known, and after."""

from __future__ import annotations

import asyncio
import struct

import pytest

from steno.contracts.wire.channel import encode_alone
from steno.contracts.wire.frames import Announce, ModelCard
from steno.contracts.wire.packets import MAX_HELLO_BYTES
from tests.integration.relay.conftest import KEY, Relay, relay
from tests.integration.relay.test_hostile import dial, farewell, hello, packet
from tests.support.waiting import until

OFFER = (
    b"GET /workers/connect HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def frame(opcode: int, payload: bytes, *, announced: int | None = None) -> bytes:
    """Not the last of its message, masked with zeros. announced: how long its head says it is."""
    return (
        bytes([opcode, 0xFF]) + struct.pack("!Q", len(payload) if announced is None else announced) + bytes(4) + payload
    )


async def sent(running: Relay, *parts: bytes, key: str | None = None) -> bytes:
    """What comes back to these bytes, up to the reason why they are refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    shown = f"authorization: Bearer {key}\r\n".encode() if key else b""
    writer.write(OFFER + shown + b"\r\n")
    try:
        async with asyncio.timeout(60):
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.readuntil(b"are allowed")
    except (ConnectionError, asyncio.IncompleteReadError):
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize("key", [None, KEY])
async def test_no_more_than_a_hello_is_taken_in_whatever_pieces(key: str | None) -> None:
    kib = bytes(1024)
    async with relay() as running:
        too_much = {
            "announced": [frame(2, b"", announced=60 * 2**20)],
            "in two": [frame(2, kib * 200), frame(0, kib * 57)],
            "in pieces": [frame(2, kib), *[frame(0, kib * 8)] * 33],
            "as a text": [frame(1, b"", announced=MAX_HELLO_BYTES + 1)],
        }
        for name, parts in too_much.items():
            assert b"262145 bytes, at most 262144 are allowed" in await sent(running, *parts, key=key), name
        for opcode in (0, 9):  # continuations, pings: of nothing, and for ever
            tiny = frame(2, b"") + bytes([opcode | (0x80 if opcode else 0), 0x80, 0, 0, 0, 0]) * 40_000
            assert await sent(running, tiny, key=key) == b"reset", opcode
        await until(lambda: running.hub._strangers == 0)
        assert running.hub.workers() == []


async def test_a_large_hello_is_taken_and_what_comes_after_may_be_larger() -> None:
    cards = [ModelCard(f"model-{number}-{'x' * 900}", 100) for number in range(250)]
    async with relay() as running:
        large = encode_alone(hello("many", models=cards), 0)
        assert 200_000 < len(large) <= MAX_HELLO_BYTES
        worker = await dial(running, large)
        await until(lambda: running.hub.workers())
        said = Announce([ModelCard("m", 100)], True, False, "r" * 2**20)
        await worker.send(packet(1, said))
        await until(lambda: [card.name for card in running.hub.cards()] == ["m"])
        await worker.close()


async def test_a_wrong_key_is_told_also_to_who_goes_on_sending() -> None:
    async with relay() as running:
        for first, headers in ((hello(key="wrong"), {}), (hello(), {"Authorization": "Bearer wrong"})):
            socket = await dial(running, encode_alone(first, 0), **headers)
            sending = asyncio.create_task(socket.send(bytes(8 * 2**20)))
            assert await farewell(socket) == ("unauthorized", 4401)
            await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: running.hub._strangers == 0)
