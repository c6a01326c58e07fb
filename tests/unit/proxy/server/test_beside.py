"""What runs beside the server: told where to dial, ended with it, and its own end is the proxy's."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.errors import ConfigError
from steno_proxy.server.embedded_worker import EmbeddedWorker


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "ws://127.0.0.1:8000"),
        ("0.0.0.0", "ws://127.0.0.1:8000"),
        ("::", "ws://[::1]:8000"),
        ("10.0.0.7", "ws://10.0.0.7:8000"),
    ],
)
async def test_it_is_told_where_to_dial_and_runs_until_it_is_stopped(host: str, url: str) -> None:
    told: list[tuple[str, str]] = []
    ended: list[str] = []

    async def beside(url: str, key: str) -> None:
        told.append((url, key))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    companion = EmbeddedWorker(beside, lambda: ended.append("by itself"))
    companion.start(host, 8000, "key")
    await asyncio.sleep(0)
    await companion.stop()
    await companion.stop()
    assert told == [(url, "key")] and ended == ["in order"] and companion.failure is None


async def test_its_failure_is_kept_and_told() -> None:
    stopped = asyncio.Event()

    async def beside(url: str, key: str) -> None:
        raise ConfigError("no such model")

    companion = EmbeddedWorker(beside, stopped.set)
    companion.start("127.0.0.1", 8000, "")
    await stopped.wait()
    assert isinstance(companion.failure, ConfigError) and companion.failure.message == "no such model"
    await companion.stop()


async def test_an_end_without_a_reason_is_a_failure_too() -> None:
    stopped = asyncio.Event()

    async def beside(url: str, key: str) -> None:
        return None

    companion = EmbeddedWorker(beside, stopped.set)
    companion.start("127.0.0.1", 8000, "")
    await stopped.wait()
    assert isinstance(companion.failure, ConfigError)
