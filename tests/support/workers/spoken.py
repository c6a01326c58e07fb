"""A proxy whose worker has a real tokenizer and says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from steno.models import TINY
from steno_worker.config import WorkerSettings
from steno_worker.engines.scripted.engine import build
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def spoken(folder: Path, says: str = "naïve 😀 words", **settings: Any) -> AsyncIterator[tuple[Proxy, Worker]]:
    """A proxy with a scripted worker that has the tiny model's tokenizer."""
    script = folder / "script.py"
    script.write_text(f'def say(request):\n    return {{"content": {says!r}, "reasoning_content": "hm"}}\n')
    given: dict[str, Any] = {"engine": "scripted", "script": f"{script}:say", "model": str(TINY)}
    async with running(worker=False, **settings) as proxy:
        made = WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}"], **given)
        engine = build(made)
        await engine.start()
        worker = Worker(made, engine, WorkerMetrics(CollectorRegistry()))
        task = asyncio.create_task(worker.run())
        await until(lambda: proxy.app.state.hub.cards())
        try:
            yield proxy, worker
        finally:
            worker.stop()
            worker.stop()
            await task
            await engine.stop()


async def kept(proxy: Proxy, key: str) -> None:
    async with asyncio.timeout(60):
        while not await proxy.store.token_texts.touch(key):
            await asyncio.sleep(0.01)
