"""The proxy as it runs, in the test's event loop: real uvicorn, real relay, a real worker with an engine that parrots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from steno.client.client import AsyncClient
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.memory.store import MemoryStore
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.support.programs.server import serve
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, check_drawn


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


class Proxy:
    """A running proxy with one worker. `key`: of the admin, None where there is none."""

    def __init__(self, port: int, app: Any, store: SessionStore, engine: ParrotEngine, key: str | None) -> None:
        self.port, self.app, self.store, self.engine, self.key = port, app, store, engine, key
        self.url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)
        self.steno = AsyncClient(self.url, key)
        self.only_parrots = False

    def openai(self, trial_id: str, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/{trial_id}/v1", api_key=key, max_retries=0, timeout=60)

    def agent_key(self, trial_id: str) -> str:
        return self.app.state.services.keys.agent_key(trial_id) or "none"

    async def chat(self, trial_id: str, *messages: Any, **fields: Any) -> httpx.Response:
        """One request that is not streamed. A string is a user's message."""
        shaped = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        headers = {"authorization": f"Bearer {self.agent_key(trial_id)}"}
        body = {"messages": shaped} | fields
        return await self.http.post(f"/{trial_id}/v1/chat/completions", json=body, headers=headers)

    async def turns(self, trial_id: str, at_least: int = 0) -> list[Any]:
        """On record, once there are so many. What a parrot said is looked at: each token as it was drawn (I1)."""
        async with asyncio.timeout(60):
            while len(turns := await self.store.turns(trial_id)) < at_least:
                await asyncio.sleep(0.005)
        if self.only_parrots:
            check_drawn(trial_id, turns)
        return turns


@contextlib.asynccontextmanager
async def running(
    engine: ParrotEngine | None = None, *, store: SessionStore | None = None, worker: bool = True, **settings: Any
) -> AsyncIterator[Proxy]:
    if store is None and "redis_url" not in settings:
        store = MemoryStore()
    engine = engine or ParrotEngine()
    app = create_app(ProxySettings(**settings), store)
    store = app.state.services.store
    key = settings.get("admin_key")
    async with serve(app) as port:
        proxy = Proxy(port, app, store, engine, key)
        task = None
        if worker:
            proxy.only_parrots = type(engine) is ParrotEngine
            given = WorkerSettings(proxy=[f"ws://127.0.0.1:{port}"], max_backoff_s=0.2, **({"key": key} if key else {}))
            run = Worker(given, engine, WorkerMetrics(CollectorRegistry()))
            task = asyncio.create_task(run.run())
            await until(lambda: app.state.hub.cards())
        try:
            yield proxy
        finally:
            await proxy.http.aclose()
            await proxy.steno.close()
            if task is not None:
                task.cancel()  # killed: no test waits for its last acknowledgement, which comes within 0.2 s
                done, _ = await asyncio.wait({task}, timeout=60)
                assert done, "the worker did not end"
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running() as found:
        yield found
