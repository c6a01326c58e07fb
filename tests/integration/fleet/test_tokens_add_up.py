"""Every token that the engine sampled is on record, or counted with the reason why not, on both sides alike (I4): agents leave,
answers end at stop strings in the middle of a step, sockets are cut, and one stays away for longer than the proxy waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from steno.models import TINY
from tests.support.machine.redis_server import RedisServer
from tests.support.machine.tcprelay import TcpRelay
from tests.support.programs.ports import free_port
from tests.support.programs.stack import Stack, running
from tests.support.records.tokens import counters, tokens_add_up
from tests.support.waiting import until

AGENTS = 12
MAX_TOKENS = 250


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    redis = RedisServer()
    try:
        options = ["--redis-url", redis.url, "--resume-grace-s", "3", "--heartbeat-s", "0.5", "--silence-s", "2"]
        with running(tmp_path, None, proxy=options) as one:
            yield one
    finally:
        redis.close()


async def test_what_the_engine_sampled_is_what_is_on_record_and_what_is_accounted_for(stack: Stack) -> None:
    metrics = free_port()
    async with TcpRelay("127.0.0.1", stack.port) as relay:
        engine = ["--engine", "transformers", "--model", str(TINY), "--max-streams", "8"]
        stack.start_worker(*engine, "--metrics-port", str(metrics), "--max-backoff-s", "0.2", port=relay.port)
        await asyncio.to_thread(stack.wait_for_model)
        begun = asyncio.Semaphore(0)
        async with httpx.AsyncClient(timeout=120) as client:
            answers = [asyncio.create_task(answer(client, stack, number, begun)) for number in range(AGENTS)]
            for _ in range(3):
                await begun.acquire()
                dialled = await count(metrics, "reconnects")
                relay.cut()
                await counts_more(metrics, "reconnects", dialled)
            relay.pause()
            await until(lambda: "is lost" in (stack.folder / "proxy.log").read_text())
            relay.resume()
            kinds = await asyncio.gather(*answers)
            await counts_more(metrics, "channels_lost", 0)
        assert "left" in kinds and len(kinds) == AGENTS
        counted = await asyncio.to_thread(tokens_add_up, stack, [metrics])
        assert counted["steno_worker_reconnects_total"] >= 3 and counted["steno_worker_channels_lost_total"] >= 1
        assert counted["steno_proxy_completion_tokens_total"] > 0
        async with httpx.AsyncClient(timeout=120) as client:  # it serves again, and they still add up
            await answer(client, stack, AGENTS, begun)
        await asyncio.to_thread(tokens_add_up, stack, [metrics])


async def counts_more(metrics: int, name: str, than: int) -> None:
    """Until the worker does."""
    async with asyncio.timeout(60):
        while await count(metrics, name) <= than:
            await asyncio.sleep(0.05)


async def count(metrics: int, name: str) -> int:
    return (await asyncio.to_thread(counters, f"http://127.0.0.1:{metrics}/metrics"))[f"steno_worker_{name}_total"]


async def answer(client: httpx.AsyncClient, stack: Stack, number: int, begun: asyncio.Semaphore) -> str:
    """Returns: how it ended: `left` in its middle, by the agent; `broken`, `refused` or `done`."""
    body = {
        "messages": [{"role": "user", "content": f"say {number}"}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stop": ["e"] if number % 3 == 1 else None,
    }
    chunks = 0
    try:
        async with client.stream("POST", stack.base_url(f"t{number}") + "/chat/completions", json=body) as response:
            if response.status_code != 200:
                return "refused"
            async for line in response.aiter_lines():
                chunks += line.startswith("data: {")
                if chunks == 3:
                    begun.release()
                if number % 3 == 0 and chunks == 5:
                    return "left"
    except httpx.RemoteProtocolError:
        return "broken"
    return "done"
