"""`steno proxy` and `steno worker`: settings in, a program that runs until it is told to stop."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from steno_cli.terminal.output import require_modules

if TYPE_CHECKING:
    from steno_proxy.config.settings import ProxySettings
    from steno_worker.config import WorkerSettings


def proxy(settings: ProxySettings) -> None:
    """Run the recording proxy: agents speak to it over HTTP, workers dial in.

    With --upstream PROVIDER/MODEL a worker that passes everything on to that model runs in the same process: steno proxy
    --upstream anthropic/claude-sonnet-4-5

    Every flag is also an environment variable (--redis-url: STENO_REDIS_URL) and a key of the --config file (redis_url). The
    command line wins over the environment, the environment over the file.
    """
    from steno_proxy.server.app import run

    if settings.upstream is None:
        sys.exit(run(settings))
    from steno_cli.commands.upstream import upstream_worker

    sys.exit(run(settings, upstream_worker(settings)))


def worker(settings: WorkerSettings) -> None:
    """Run an inference worker: it loads an engine, dials one or more proxies and samples for them.

    Every flag is also an environment variable (--model: STENO_WORKER_MODEL) and a key of the --config file (model). What stands
    after `--` goes to the engine as it is: steno worker --engine vllm --model DIR -- --tool-call-parser hermes
    """
    # Of other engines, the first module that is missing says which extra is meant.
    if settings.engine in ("litellm", "vllm"):
        require_modules(settings.engine)
    from steno_worker.main import main

    sys.exit(main(settings))
