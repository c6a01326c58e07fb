"""Clients that stop reading, and keep their connections: once their session has ended nothing is kept for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno_proxy.api.agents import generation
from steno_proxy.server.http_protocol import BoundedHttp
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 200_000,
    "stream": True,
}
GEMINI = "/t/v1beta/models/m:streamGenerateContent?alt=sse"
GEMINI_BODY = {
    "contents": [{"role": "user", "parts": [{"text": "x"}]}],
    "generationConfig": {"maxOutputTokens": 200_000},
}
PATHS = ["/t/v1/chat/completions", "/t/v1/messages", GEMINI]
"""The first breaks its connection, the second says an error before it ends, the third does both."""
AGAIN = "x-stainless-retry-count: 1\r\n"
LETTERS = 60_000
"""Each an event: more than the buffers between a proxy and a client on one machine take."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LAST_WORDS_S", 0.5)


def answering() -> int:
    """Requests that somebody answers, in this process."""
    waits = [_where(task) for task in asyncio.all_tasks()]
    return sum(names[:1] == ["run_asgi"] and "connect" not in names for names in waits)  # that is a worker's


@contextlib.asynccontextmanager
async def deaf(proxy: Proxy, path: str, marks: str = "") -> AsyncIterator[socket.socket]:
    """A client that has asked and reads nothing."""
    payload = json.dumps(GEMINI_BODY if path == GEMINI else BODY).encode()
    said = f"host: localhost\r\ncontent-type: application/json\r\n{marks}content-length: {len(payload)}\r\n"
    head = f"POST {path} HTTP/1.1\r\n{said}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", proxy.port))
        client.sendall(head.encode() + payload)
        yield client


def full(connections: int) -> bool:
    """Whether so many of the server's connections can't be written to now."""
    return sum("drain" in _where(task) for task in asyncio.all_tasks()) >= connections


def _where(task: asyncio.Task[Any]) -> list[str]:
    """The functions in which a task waits, outermost first."""
    names, inner = [], task.get_coro()
    while inner is not None:
        names.append(getattr(inner, "__name__", ""))
        inner = getattr(inner, "cr_await", None)
    return names


async def end_session(proxy: Proxy) -> None:
    answer = await proxy.http.post("/sessions/t/complete", json={"reward": 1.0})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
async def test_who_came_first(path: str) -> None:
    async with running(ParrotEngine(lambda request: Say("x" * LETTERS))) as proxy:
        async with deaf(proxy, path):
            await until(lambda: full(1))
            await end_session(proxy)
            await until(lambda: answering() == 0)
        [turn] = await proxy.turns("t")
        assert turn.partial


@pytest.mark.parametrize("path", PATHS)
async def test_who_joined_a_turn_that_runs(path: str) -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("x" * LETTERS, gates={1: gate}))) as proxy:
        async with deaf(proxy, path), deaf(proxy, path, AGAIN):
            await until(lambda: any(request.log.joined for request in proxy.app.state.turns._running))
            gate.set()
            await until(lambda: full(1))
            await end_session(proxy)
            await until(lambda: answering() == 0)
        assert len(await proxy.turns("t")) == 1


@pytest.mark.parametrize("recorded", [False, True])
async def test_nor_is_their_connection(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the proxy waited to write, or has written what the connection doesn't take: an answer on record leaves at once."""
    lost: list[int] = []
    connection_lost = BoundedHttp.connection_lost

    def noted(self: BoundedHttp, error: Exception | None) -> None:
        lost.append(self.client[1] if self.client else 0)
        connection_lost(self, error)

    monkeypatch.setattr(BoundedHttp, "connection_lost", noted)
    monkeypatch.setattr(BoundedHttp, "head_s", 3.0)
    async with running(ParrotEngine(lambda request: Say("x" * LETTERS))) as proxy:
        if recorded:
            assert (await proxy.http.post(PATHS[0], json=BODY)).status_code == 200
        async with deaf(proxy, PATHS[0], AGAIN * recorded) as client:
            if recorded:
                await asyncio.to_thread(client.recv, 1)
            await until(lambda: answering() == 0 if recorded else full(1))
            await end_session(proxy)
            await until(lambda: client.getsockname()[1] in lost)


async def test_no_keepalives_pile_up_for_it() -> None:
    async with (
        running(ParrotEngine(lambda request: Say("x" * LETTERS)), keepalive_s=0.01) as proxy,
        deaf(proxy, PATHS[0]),
    ):
        await until(lambda: full(1))
        await asyncio.sleep(1)  # as long as a hundred of them
        assert full(1) and not full(3)
