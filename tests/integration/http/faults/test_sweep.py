"""What the proxy sees to by itself goes on, whatever fails or hangs, and keeps no process from ending."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from steno.contracts.records import Limits
from steno.contracts.rest import SessionSpec
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running
from tests.support.contracts.recording import record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.programs import stack


async def test_a_record_that_can_not_be_read_stops_no_sweep() -> None:
    store = MemoryStore()

    async def unreadable() -> Any:
        raise ValueError("a record that this release can't read")

    store.runs.close_due = unreadable  # type: ignore[method-assign]
    async with running(sweep_s=0.02, store=store) as proxy:
        await proxy.steno.register("t", SessionSpec(limits=Limits(max_idle_s=0.2)))
        assert (await proxy.chat("t", "x")).status_code == 200
        async with asyncio.timeout(60):
            while (await store.session("t")).status == "open":
                await asyncio.sleep(0.01)


def test_an_archive_that_hangs_holds_up_neither_the_sweep_nor_the_end_of_the_process(tmp_path: Path) -> None:
    """As its mount may: who opens a FIFO to read it waits until somebody opens it to write."""
    archive = tmp_path / "archive"
    archive.mkdir()
    os.mkfifo(archive / "archive.json")
    server = RedisServer()
    try:
        words = ["--redis-url", server.url, "--archive", str(archive), "--sweep-s", "0.05", "--retention-s", "0.01"]
        with stack.running(tmp_path / "run", None, proxy=words) as found, server.client() as client:
            wait_for(lambda: bool(client.exists("steno:{:index}:archiver")))  # a round has begun, and ends no more
            spec = {"limits": {"max_idle_s": 0.2}}
            assert httpx.post(found.url + "/sessions/t", json=spec, timeout=60).status_code == 200
            asyncio.run(a_turn_elsewhere(server.url))
            wait_for(lambda: found.get("/sessions/t")["status"] != "open")
            assert client.exists("steno:{:index}:archiver")
            found.proxy.terminate()
            assert found.proxy.wait(60) == 0
    finally:
        server.close()


async def a_turn_elsewhere(url: str) -> None:
    """At another replica, as far as the proxy knows."""
    store = RedisStore(url, **PATIENT)
    await record(store, "t", 1)
    await store.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
