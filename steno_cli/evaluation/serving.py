"""A proxy and a worker of this machine, which serve one model while it is evaluated."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from steno.client.client import AsyncClient
from steno.config.extras import missing
from steno_cli.demo.processes import DemoFailed, DemoProcess, start, until_healthy
from steno_cli.terminal.output import console, require_modules


class Died(DemoFailed):
    """A model that was served is not served any more."""


class Served(NamedTuple):
    """Where a model is served, and the key of the run that may roll out there."""

    url: str
    key: str


@contextlib.asynccontextmanager
async def served(
    model: str, engine: str, engine_args: Sequence[str], *, max_streams: int, port: int, run_id: str
) -> AsyncIterator[Served]:
    """Start a proxy and a worker that serve a model, and end both.

    Args: engine: `auto` is vllm where it is installed, else transformers. port: of the proxy, on 127.0.0.1.
    Raises: DemoFailed: one of the two ended before the model was served; Died: at the end, the model is not served any more;
        ModuleNotFoundError: a package is missing.
    """
    if engine == "auto":
        engine = "transformers" if missing(["vllm"]) else "vllm"
    require_modules("fastapi", "uvicorn", "vllm" if engine == "vllm" else "torch")
    url, admin, worker_key = f"http://127.0.0.1:{port}", secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steno-evaluate-")))
        console(stderr=True).print(f"serving {model} with {engine} on {url}", markup=False, soft_wrap=True)
        proxy = await start(
            stack, folder, "proxy", "--port", str(port), STENO_ADMIN_KEY=admin, STENO_WORKER_KEY=worker_key
        )
        words = ["--proxy", url, "--engine", engine, "--model", model, "--max-streams", str(max_streams)]
        more = ["--", *engine_args] if engine_args else []
        worker = await start(stack, folder, "worker", *words, *more, STENO_WORKER_KEY=worker_key)
        await until_healthy(url, proxy)
        async with AsyncClient(url, admin) as client:
            await _until_served(client, proxy, worker)  # a large model takes minutes
            key = await client.run_key(run_id)
            assert key is not None, "the proxy has an admin key"
            yield Served(url, key)
            try:  # what trials got of an engine that died is worth nothing
                await _until_served(client, proxy, worker)
            except DemoFailed as error:
                raise Died(error.message) from None


async def _until_served(client: AsyncClient, proxy: DemoProcess, worker: DemoProcess) -> None:
    """A worker that has lost its connection comes back; one whose engine has died ends. Raises: DemoFailed: one of them has."""
    while True:
        proxy.check()
        worker.check()
        if any(each.models for each in await client.workers()):
            return
        await asyncio.sleep(0.5)
