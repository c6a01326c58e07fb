"""A client that was made in another process, or in another event loop, than the one that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from steno.client.client import AsyncClient, Client
from steno.contracts.errors import NotFound

FORK = multiprocessing.get_context("fork")


class CountingServer(ThreadingHTTPServer):
    """Answers 404 with the path that was asked for. connections: where they came from."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.connections: set[Any] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def do_GET(self) -> None:
        self.server.connections.add(self.client_address)
        self.send_response(404)
        body = b'{"error": {"code": "not_found", "message": "%s"}}' % self.path.encode()
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def kept_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx closes a connection that was idle for 5 s; a fork may take that long."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    monkeypatch.setattr("steno.client.client.NO_BOUND", limits)
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, limits=limits))


def ask(client: Client, trial_id: str) -> None:
    with pytest.raises(NotFound, match=f"/sessions/{trial_id}$"):
        client.session(trial_id)


async def ask_async(client: AsyncClient, trial_id: str) -> None:
    with pytest.raises(NotFound, match=f"/sessions/{trial_id}$"):
        await client.session(trial_id)


def in_child(call: Any, *args: Any) -> None:
    child = FORK.Process(target=call, args=args)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_fork_has_connections_of_its_own(server: CountingServer) -> None:
    """Two processes on one connection read each other's answers."""
    with Client(server.url, retries=0) as client:
        ask(client, "before")
        in_child(ask, client, "child")
        in_child(ask, client, "another")
        ask(client, "after")
    assert len(server.connections) == 3


def test_a_fork_that_closes_its_client_leaves_its_parent_with_its_own(server: CountingServer) -> None:
    with Client(server.url, retries=0) as client:
        ask(client, "before")
        in_child(client.close)
        ask(client, "after")
    assert len(server.connections) == 1


def test_a_fork_has_asynchronous_connections_of_its_own(server: CountingServer) -> None:
    client = AsyncClient(server.url, retries=0)
    with asyncio.Runner() as runner:

        def in_its_loop(trial_id: str) -> None:
            runner.run(ask_async(client, trial_id))

        in_its_loop("before")
        in_child(in_its_loop, "child")
        in_child(lambda: asyncio.run(ask_async(client, "another")))
        in_its_loop("after")
        runner.run(client.close())
    assert len(server.connections) == 3


def test_each_event_loop_has_connections_of_its_own(server: CountingServer) -> None:
    """One after the other, and several at the same time, in threads."""
    client = AsyncClient(server.url, retries=0)
    assert not server.connections

    async def several(name: str) -> None:
        for _ in range(3):
            await asyncio.gather(*(ask_async(client, name) for _ in range(2)))

    for name in ("first", "second", "third"):
        asyncio.run(several(name))
    assert len(client._pools) == 1, "those of loops that are closed are let go of"
    threads = [threading.Thread(target=lambda name=name: asyncio.run(several(name))) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(server.connections) == 12


async def test_a_client_that_was_closed_is_closed() -> None:
    client = AsyncClient("http://proxy", transport=httpx.MockTransport(lambda _: httpx.Response(204)))
    await client.delete("a")
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.delete("a")
    blocking = Client("http://proxy", transport=httpx.MockTransport(lambda _: httpx.Response(204)))
    with contextlib.closing(blocking):
        blocking.delete("a")
    with pytest.raises(RuntimeError, match="closed"):
        blocking.delete("a")
