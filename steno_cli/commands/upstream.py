"""`steno proxy --upstream`: a worker with the litellm engine in the proxy's process, over loopback.

It speaks the relay's protocol like any worker: there is one path through the proxy. LiteLLM takes ten times the proxy's own CPU
for each piece of text, so for more than a few agents at once run `steno worker --engine litellm` processes instead.
"""

from __future__ import annotations

import logging
import secrets

from pydantic import SecretStr

from steno.contracts.errors import ConfigError, EngineFailed
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.embedded_worker import Beside
from steno_worker.config import WorkerSettings
from steno_worker.main import REFUSED, Worker, build_engine
from steno_worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)
MAX_STREAMS = 1024
"""The upstream has limits of its own, and says so (429)."""


def upstream_worker(settings: ProxySettings) -> Beside:
    """The worker for `settings.upstream`. Its engine is built at once, so that a wrong name stops the proxy before it listens.

    Raises: ConfigError.
    """
    given = WorkerSettings(
        engine="litellm",
        model=settings.upstream,
        api_base=settings.api_base,
        api_key=settings.api_key,
        worker_id=f"upstream-{secrets.token_hex(3)}",
        max_streams=MAX_STREAMS,
        max_packet_bytes=settings.max_packet_bytes,
        engine_args=[f"tokens={settings.upstream_tokens}", f"images={settings.upstream_images}"],
    )
    engine = build_engine(given)

    async def run(url: str, key: str) -> None:
        await engine.start()
        try:
            dialled = given.model_copy(update={"proxy": [url], "key": SecretStr(key) if key else None})
            log.info("upstream %s: %s", settings.upstream, "text only" if engine.cards()[0].text_only else "exact")
            code = await Worker(dialled, engine, WorkerMetrics()).run()
        finally:
            await engine.stop()
        raise (
            ConfigError("the proxy refused its own worker")
            if code == REFUSED
            else EngineFailed("the worker of the upstream ended")
        )

    return run
