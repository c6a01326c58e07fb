"""The proxy as it runs, in the test's event loop, and workers that are scripted over real WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvloop

from steno.client.client import AsyncClient
from steno.contracts.policy import Update, UpdateSpec
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.memory.store import MemoryStore
from tests.support.programs.server import serve
from tests.support.waiting import until
from tests.support.workers.update_peer import UpdatePeer


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


class Fleet:
    """A proxy and the workers that a test has dial it."""

    def __init__(self, app: Any, port: int) -> None:
        self.app, self.port = app, port
        self.hub = app.state.hub
        self.policies = app.state.services.policies
        self.steno = AsyncClient(f"http://127.0.0.1:{port}")
        self.peers: list[UpdatePeer] = []

    async def worker(self, worker_id: str, **given: Any) -> UpdatePeer:
        peer = UpdatePeer(worker_id, **given)
        self.peers.append(peer)
        return await peer.dial(self.port)

    async def workers(self, *ids: str, **given: Any) -> list[UpdatePeer]:
        return [await self.worker(worker_id, **given) for worker_id in ids]

    async def ended(self, update_id: str, within_s: float = 120.0) -> Update:
        async with asyncio.timeout(within_s):
            while (update := await self.steno.update(update_id, wait_s=5)).state == "running":
                await asyncio.sleep(0.01)
        return update

    async def past_deadline(self, update_id: str, ready: str) -> None:
        """Wait until the worker `ready` is ready for the update, then let the update's deadline pass."""
        run = self.policies._run(update_id)
        await until(lambda: run.members[ready].state == "ready")
        run.since = 0.0
        self.policies._tick()

    def eligible(self) -> list[str]:
        """Workers that new turns may go to, asked of the hub as a turn asks."""
        return sorted(w.id for w in self.hub._workers.values() if w.eligible and all(map(w.serves, w.models)))

    async def turns(self, count: int) -> dict[str, int]:
        """Have agents ask for so many turns; worker -> how many of them it got."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as agents:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            asked = [asyncio.create_task(agents.post(f"/t{i}/v1/chat/completions", json=body)) for i in range(count)]
            before = {peer.worker_id: len(peer.generated) for peer in self.peers}
            await until(lambda: sum(len(peer.generated) for peer in self.peers) - sum(before.values()) == count)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        return {peer.worker_id: len(peer.generated) - before[peer.worker_id] for peer in self.peers}


def shards_of(spec: UpdateSpec) -> dict[str, bytes]:
    """Contents for the shards of a spec; no two bytes that are near each other look alike."""
    found = {}
    for place, shard in enumerate(spec.manifest.shards):
        words = ((at * 2654435761 + place) % 2**32 for at in range(shard.size // 4 + 1))
        found[shard.name] = b"".join(word.to_bytes(4) for word in words)[: shard.size]
    return found


async def publish(fleet: Fleet, spec: UpdateSpec, *, piece: int = 64 * 1024) -> Update:
    """What a trainer does: post, and upload what is wanted until nothing is, and it has ended."""
    shards = shards_of(spec)
    update = await fleet.steno.post_update(spec)
    async with asyncio.timeout(60):
        while update.state == "running" or update.wants:
            for want in update.wants:
                data = memoryview(shards[want.shard])[want.offset :]
                pieces = (bytes(data[at : at + piece]) for at in range(0, len(data), piece))
                if await fleet.steno.upload_shard(update.update_id, want.shard, want.offset, pieces) > want.offset:
                    break
            update = await fleet.steno.update(update.update_id, wait_s=5)
    return update


@contextlib.asynccontextmanager
async def running(store: SessionStore | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    """Workers are taken to have dialled by now: an update does not wait for a proxy's first seconds."""
    app = create_app(ProxySettings(**({"resume_grace_s": 0.2} | settings)), store or MemoryStore())
    app.state.services.policies._settled_at = 0.0
    async with serve(app) as port:
        fleet = Fleet(app, port)
        try:
            yield fleet
        finally:
            for peer in fleet.peers:
                await peer.die()
            await fleet.steno.close()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as found:
        yield found
