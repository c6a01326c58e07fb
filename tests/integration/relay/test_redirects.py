"""An address that sends workers on to another one, and a connection that fails: neither ends a worker's other connections."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from steno_worker.relay import dialling
from steno_worker.relay.connection import ProxyConnection
from tests.integration.relay.conftest import drain, relay
from tests.support.waiting import until
from tests.support.workers.counting import ids_of

ELSEWHERE = "https://proxy.test/steno"


async def send_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(f"HTTP/1.1 308 Permanent Redirect\r\nLocation: {ELSEWHERE}\r\nContent-Length: 0\r\n\r\n".encode())
    await writer.drain()
    writer.close()


async def test_a_redirect_to_https_is_named_and_tried_again_while_the_other_proxy_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dialling, "SAY_AGAIN_S", 0.0)
    server = await asyncio.start_server(send_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if ELSEWHERE in record.getMessage()]

    with caplog.at_level(logging.WARNING):
        async with server, relay() as running:
            proxies = [f"ws://127.0.0.1:{running.port}", f"ws://127.0.0.1:{port}"]
            worker = await running.worker(proxy=proxies, connected=False)
            await until(lambda: len(told()) >= 2)
            await until(lambda: worker.metric("steno_worker_proxies") == 1)
            assert ids_of(await drain(running.open(5))) == list(range(5)) and not worker.task.done()
    assert "HTTP 308" in told()[0] and "wss://HOST:PORT" in told()[0]


async def test_a_socks_proxy_without_its_package_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("https_proxy", "socks5h://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(dialling, "SAY_AGAIN_S", 0.0)

    def told() -> list[str]:
        return [text for record in caplog.records if "ws://proxy.test" in (text := record.getMessage())]

    async with relay() as running:
        proxies = [f"ws://127.0.0.1:{running.port}", "ws://proxy.test:1"]
        worker = await running.worker(proxy=proxies, connected=False)
        await until(lambda: len(told()) >= 2)
        await until(lambda: worker.metric("steno_worker_proxies") == 1)
        assert ids_of(await drain(running.open(5))) == list(range(5)) and not worker.task.done()
    assert "python-socks" in told()[0]


async def test_a_connection_that_fails_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, carry = "ws://127.0.0.1:9", ProxyConnection.run

    async def run(self: ProxyConnection) -> None:
        if self.url.startswith(bad):
            raise LookupError("not foreseen")
        await carry(self)

    monkeypatch.setattr(ProxyConnection, "run", run)
    async with relay() as running:
        worker = await running.worker(proxy=[f"ws://127.0.0.1:{running.port}", bad], connected=False)
        await until(lambda: worker.metric("steno_worker_proxies") == 1)
        assert ids_of(await drain(running.open(5))) == list(range(5))
        worker.worker.stop()
        assert await asyncio.wait_for(worker.task, 60) == 0
        assert "not foreseen" in caplog.text and bad in caplog.text
        alone: Any = await running.worker(proxy=[bad], connected=False)
        with pytest.raises(LookupError, match="not foreseen"):
            await asyncio.wait_for(alone.task, 60)
        running.forget(alone)
