"""How many calls of one client are out at a time, and which are not counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from steno.client import client as module
from steno.client.client import AT_ONCE, AsyncClient, Client
from steno.contracts.errors import Unreachable


def asked(handle: Any, retries: int = 0) -> AsyncClient:
    return AsyncClient("http://proxy", transport=httpx.MockTransport(handle), retries=retries)


async def test_short_calls_wait_for_a_place_and_those_that_may_wait_take_none() -> None:
    """A thousand trials that end together: httpx's pool would compare each call that waits with each connection."""
    out, most, held = 0, 0, 0
    go, over = asyncio.Event(), asyncio.Event()

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal out, most, held
        if "wait_s" in request.url.params:
            held += 1
            await over.wait()
            return httpx.Response(404)
        out += 1
        most = max(most, out)
        await go.wait()
        out -= 1
        return httpx.Response(204)

    async with asked(handle) as client:
        waiting = [asyncio.ensure_future(client.update(f"u{number}", wait_s=60.0)) for number in range(3 * AT_ONCE)]
        short = [asyncio.ensure_future(client.delete(f"t{number}")) for number in range(3 * AT_ONCE)]
        for _ in range(100):  # rounds of the loop, in which all that may go out does
            await asyncio.sleep(0)
        assert out == AT_ONCE
        go.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*short)
        assert (most, held) == (AT_ONCE, len(waiting)) and not any(each.done() for each in waiting)
        over.set()
        assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {Unreachable}


async def test_a_cancelled_call_gives_its_place_back() -> None:
    """One that was out, and one that still waited for its place."""
    out, full = 0, asyncio.Event()

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal out
        if request.url.path.endswith("/later"):
            return httpx.Response(204)
        out += 1
        if out == AT_ONCE:
            full.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with asked(handle) as client:
        calls = [asyncio.ensure_future(client.delete(f"t{number}")) for number in range(3 * AT_ONCE)]
        await full.wait()
        for each in calls:
            each.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} == {asyncio.CancelledError} and out == AT_ONCE
        async with asyncio.timeout(60):
            await asyncio.gather(*(client.delete("later") for _ in range(2 * AT_ONCE)))


async def test_a_call_that_pauses_before_its_next_attempt_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, others = set[str](), asyncio.Event()

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/other"):
            others.set()
        elif request.url.path not in refused:
            refused.add(request.url.path)
            return httpx.Response(503)
        return httpx.Response(204)

    async def until_another_was_sent(_: float) -> None:
        await others.wait()

    monkeypatch.setattr(module, "_sleep", until_another_was_sent)
    async with asked(handle, retries=1) as client:
        paused = [asyncio.ensure_future(client.delete(f"t{number}")) for number in range(AT_ONCE)]
        while len(refused) < AT_ONCE:
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await client.delete("other")
            await asyncio.gather(*paused)


def test_threads_of_one_client_do_not_wait_for_each_other() -> None:
    """Each may watch a session: httpx's own pool has a hundred places."""
    threads = 120

    def serve(listener: socket.socket, held: contextlib.ExitStack) -> None:
        asking = [held.enter_context(listener.accept()[0]) for _ in range(threads)]
        for each in asking:
            each.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with (
        contextlib.ExitStack() as held,
        socket.create_server(("127.0.0.1", 0), backlog=threads) as listener,
        ThreadPoolExecutor(threads) as pool,
        Client(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0, timeout_s=120.0) as client,
    ):
        threading.Thread(target=serve, args=(listener, held), daemon=True).start()
        calls = [pool.submit(client.delete, f"t{number}") for number in range(threads)]
        assert {type(each.exception()) for each in calls} <= {Unreachable, type(None)}
