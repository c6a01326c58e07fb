"""What those who have no key can cost a proxy: memory, descriptors, and a place for its workers. A process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from steno.contracts.wire.peer import HANDSHAKE_S
from steno_proxy.workers.hub import MAX_STRANGERS
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.support.programs.ports import free_port
from tests.support.programs.processes import SLOW_S, process, until_it_answers
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine

KEY = "the admin key"
ADMIN = {"authorization": f"Bearer {KEY}"}
HUGE = 60 * 2**20
MAY_COST_BYTES = 64 * 2**20


class Running:
    def __init__(self, port: int, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.url = f"http://127.0.0.1:{port}"
        self.socket_url = f"ws://127.0.0.1:{port}/workers/connect"

    def peak_bytes(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", headers=ADMIN, timeout=SLOW_S).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def workers(self) -> list[Any]:
        items: list[Any] = httpx.get(self.url + "/workers", headers=ADMIN, timeout=SLOW_S).json()["items"]
        return items


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    port, log = free_port(), tmp_path_factory.mktemp("strangers") / "proxy.log"
    command = [sys.executable, "-m", "steno", "proxy", "--port", str(port)]
    with process(command, log, {"STENO_ADMIN_KEY": KEY}) as child:
        running = Running(port, child.pid, log)
        until_it_answers(child, log, lambda: httpx.get(running.url + "/healthz", timeout=10).is_success)
        yield running
    assert child.returncode == 0  # it stops in order after all this


@contextlib.asynccontextmanager
async def worker(proxy: Running) -> AsyncIterator[None]:
    settings = WorkerSettings(proxy=[proxy.url.replace("http", "ws")], key=KEY, worker_id="known", max_backoff_s=0.2)
    run = Worker(settings, ParrotEngine(), WorkerMetrics(CollectorRegistry()))
    task = asyncio.create_task(run.run())
    try:
        yield
    finally:
        run.stop()
        run.stop()
        await asyncio.wait({task}, timeout=SLOW_S)


OFFER = (
    "GET /workers/connect HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PIECE_BYTES = (HUGE, 2**20, 16 * 1024)
WRONG = {3: "authorization: Bearer wrong\r\n"}


async def stranger(port: int, number: int) -> bytes:
    """Send a message of 60 MiB, whole or in pieces of 1 MiB or 16 KiB, or with a wrong key. Returns what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{OFFER}{WRONG.get(number % 4, '')}\r\n".encode())
    assert b"101" in await reader.readuntil(b"\r\n\r\n")
    came = bytearray()

    async def hears() -> None:
        """Piece by piece: a reset that follows takes nothing of what has come."""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                came.extend(part)

    hearing = asyncio.create_task(hears())
    piece = PIECE_BYTES[number % 4 % 3]
    with contextlib.suppress(ConnectionError):
        for sent in range(0, HUGE, piece):
            # Binary, then continuations, none of them the last; masked with zeros.
            writer.write(bytes([0 if sent else 2, 0xFF]) + piece.to_bytes(8, "big") + bytes(4))
            for _ in range(0, piece, 2**18):
                writer.write(bytes(min(piece, 2**18)))
                await writer.drain()
        writer.write(b"\x88\x80" + bytes(4))  # Close, as a client answers one
    try:
        await hearing
        return bytes(came)
    finally:
        writer.close()


async def test_strangers_who_send_much_cost_little_and_keep_no_worker_out(proxy: Running) -> None:
    before = proxy.peak_bytes()
    port = int(proxy.url.rpartition(":")[2])
    attack = [asyncio.create_task(stranger(port, number)) for number in range(20)]
    async with worker(proxy):
        await until(lambda: len(proxy.workers()) == 1, SLOW_S)
        ends = await asyncio.gather(*attack)
        grown = proxy.peak_bytes() - before
        assert grown < MAY_COST_BYTES, f"{grown >> 20} MiB on {before >> 20}"
        for number, came in enumerate(ends):
            why = b"unauthorized" if number % 4 == 3 else b"protocol_error"
            assert why in came or b"no Hello in time" in came, (number, came)  # the latter on a slow machine
        assert any(b"262145 bytes" in came for came in ends)
        assert proxy.workers()[0]["connected"]


async def test_silent_strangers_are_few_and_a_worker_that_shows_its_key_passes_them(proxy: Running) -> None:
    async with await crowd(proxy), worker(proxy):
        await until(lambda: len(proxy.workers()) == 1, SLOW_S)
    await until_let_in(proxy)


async def crowd(proxy: Running) -> contextlib.AsyncExitStack:
    """As many silent strangers as may wait, when one more has been refused. Others where these had to go before that one came:
    this process has stood still."""
    end = time.monotonic() + SLOW_S
    while True:
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as opened:
            all_came = all(await asyncio.gather(*(comes(proxy, opened) for _ in range(MAX_STRANGERS))))
            if await comes(proxy, opened):
                assert time.monotonic() - began > HANDSHAKE_S, "one more than may wait"
            elif all_came:
                return opened.pop_all()
        assert time.monotonic() < end, "fewer than may wait"
        await until_let_in(proxy)


async def comes(proxy: Running, opened: contextlib.AsyncExitStack) -> bool:
    """Whether a stranger's socket is taken; `opened` closes it."""
    try:
        await opened.enter_async_context(connect(proxy.socket_url, compression=None, open_timeout=SLOW_S))
    except InvalidStatus as refused:
        assert refused.response.status_code == 503
        return False
    return True


async def until_let_in(proxy: Running) -> None:
    """Until a stranger's socket is taken again."""
    async with asyncio.timeout(SLOW_S):
        while True:
            with contextlib.suppress(InvalidStatus):
                async with connect(proxy.socket_url, compression=None, open_timeout=SLOW_S):
                    return
            await asyncio.sleep(0.05)


async def test_a_full_table_of_descriptors_is_said_and_counted_and_connections_wait(proxy: Running) -> None:
    assert proxy.metric("steno_proxy_accept_failures_total") == 0
    used = max(int(found.name) for found in Path(f"/proc/{proxy.pid}/fd").iterdir())
    _, most = usual = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (used + 9, most))
    port = int(proxy.url.rpartition(":")[2])
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(used + 20)]
    await until(lambda: "connections can't be accepted" in proxy.log.read_text(), SLOW_S)
    reader, writer = held[-1]
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    for _, other in held[:-1]:
        other.close()
    assert (await asyncio.wait_for(reader.readline(), SLOW_S)).startswith(b"HTTP/1.1 200")  # it had waited
    writer.close()
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, usual)
    assert proxy.metric("steno_proxy_accept_failures_total") > 0
    assert proxy.log.read_text().count("connections can't be accepted") == 1
