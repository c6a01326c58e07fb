"""What this process does itself is not the other side's silence."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from steno_proxy.store.redis.link.patience import LoopTimeout


async def test_a_reply_that_came_while_the_loop_was_held_is_read() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    asyncio.get_running_loop().call_soon(theirs.send, b"reply")
    asyncio.get_running_loop().call_soon(
        time.sleep, 1.0
    )  # in the same turn: the timeout is over before any socket is read
    async with LoopTimeout(0.4):
        assert await reader.readexactly(5) == b"reply"
    writer.close()
    theirs.close()


async def test_silence_is_silence() -> None:
    with pytest.raises(TimeoutError):
        async with LoopTimeout(0.05):
            await asyncio.Event().wait()


async def test_a_loop_that_is_always_held_waits_for_no_silence_for_ever() -> None:
    held = asyncio.create_task(_hold())
    with pytest.raises(TimeoutError):
        async with LoopTimeout(0.2):
            await asyncio.Event().wait()
    held.cancel()


async def _hold() -> None:
    while True:
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)
        await asyncio.sleep(0)


async def test_a_cancellation_from_outside_is_one() -> None:
    async def wait() -> None:
        async with LoopTimeout(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_silence_in_a_task_that_was_cancelled_before_is_a_timeout() -> None:
    async def last_words() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(TimeoutError):
                async with LoopTimeout(0.1):
                    await asyncio.Event().wait()

    task = asyncio.create_task(last_words())
    await asyncio.sleep(0)
    task.cancel()
    await task
