"""What is looked at before the first group is registered: is the proxy there and does the key open the run, is the command there
for trials, is there a trainer, does a worker serve a model. The rest only a trial can show: the first one runs alone until its
first turn (`first_turns.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import httpx

from steno.client.client import AsyncSteno
from steno.contracts.errors import ConfigError, StenoError, Unreachable
from steno.contracts.leases import RunView
from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.admission import trainer_of
from steno_rollouts.build import Prepared
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import fill
from steno_rollouts.trials.executor import CannotStart, Exit, TrialJob
from steno_rollouts.trials.harbor.executor import HarborExecutor
from steno_rollouts.trials.runner import RunnerOptions

PROXY_S = 2.5
"""For an answer of the proxy, before it is said that there is none."""
PATIENCE_S = 30.0
"""For a proxy that is being started."""
COMMAND_S = 60.0
SERVED_S = 0.5
"""Between two looks at whether a worker serves a model."""
_FIND = 'case $1 in */*) [ -f "$1" ] && [ -x "$1" ] ;; *) command -v -- "$1" >/dev/null 2>&1 ;; esac'
"""dash finds a path that may not be run."""


async def check_proxy(prepared: Prepared, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> RunView:
    """The run as the proxy has it. Says within 3 s that there is no answer, and goes on asking for a while.

    Raises: Unreachable: none came. Forbidden, Unauthorized: the key does not open the run.
    """
    settings = prepared.settings
    until, said = time.monotonic() + patience_s, False
    async with AsyncSteno(settings.proxy, settings.key, timeout_s=PROXY_S, retries=0) as client:
        while True:
            try:
                return await client.run(prepared.run_id)
            except StenoError as error:
                if not error.retryable or time.monotonic() > until:
                    raise
                if not said:
                    hint = " (--proxy, STENO_PROXY)" if isinstance(error, Unreachable) else ""
                    say(f"{error.message}{hint}; asking again for {patience_s:.0f} s")
                said = True
            await asyncio.sleep(0.5)


async def check_command(prepared: Prepared) -> None:
    """Look for the command where a trial of the first task would: with its environment, in its folder, confined as it is, or in
    its container. With Harbor: set up a sandbox of the first task, with its agent.

    Raises: ConfigError: it is not there, or may not be run. Unreachable: a container can't reach the proxy.
    """
    settings, task = prepared.settings, prepared.tasks[0]
    if prepared.harbor is not None:
        await HarborExecutor(prepared.harbor, settings).check(task, await public_url(settings.proxy))
        return
    name = f"steno-preflight-{os.getpid()}"
    folder = settings.work_dir / name
    session = Session(trial_id=name, created_at=0.0, updated_at=0.0)
    url = f"{settings.proxy.rstrip('/')}/{name}"
    trial = Trial(session=session, urls=dict.fromkeys(("openai", "anthropic", "gemini"), url))
    executor = prepared.executor()
    try:
        inherited = RunnerOptions((), settings.proxy, folder).inherited
        work, variables = await executor.prepare(folder, trial, task, inherited)
        program = fill(prepared.command[:1], task, variables)[0]
        find = ["/bin/sh", "-c", _FIND, "sh", program]
        ended = await executor.run(TrialJob(name, find, variables, folder, work, COMMAND_S, task, url))
    except CannotStart as error:
        ended = Exit(None, error=str(error))
    finally:
        await asyncio.to_thread(workdir.remove, folder)
    if ended.code is None or ended.timed_out:
        raise ConfigError(f"command: a trial can't be started here: {ended.error or 'no shell ends'}", field="command")
    if ended.code:
        absent = "there is no such program, or it is not executable (chmod +x)"
        where = absent if "/" in program else "not found on the PATH of trials"
        if prepared.engine is not None:
            raise ConfigError(f"command: {program}: {where}, in the image of task {task.task_id!r}", field="command")
        hidden = " (confined: what --private and --confine hide is not there)" if prepared.confinement else ""
        path = "" if "/" in program else f", {variables.get('PATH', '')}"
        raise ConfigError(f"command: {program}: {where}{path}{hidden}", field="command")


async def public_url(proxy: str) -> str:
    """Where agents reach the proxy, as it says; else where these rollouts do."""
    async with httpx.AsyncClient(timeout=PROXY_S) as http:
        try:
            said = (await http.get(f"{proxy.rstrip('/')}/openapi.json")).json()
        except (httpx.TransportError, ValueError):
            return proxy.rstrip("/")
    found = [server["url"] for server in said.get("servers", []) if str(server.get("url")).startswith("http")]
    return str(found[-1] if found else proxy).rstrip("/")


async def until_served(prepared: Prepared, say: Callable[[str], None]) -> None:
    """Wait until a worker serves a model, as long as that takes: a large one is loaded for minutes, and until then every trial
    would fail. Not where nothing is to stop the rollouts (`stop_after_failures` 0)."""
    settings, said = prepared.settings, False
    if not settings.stop_after_failures:
        return
    async with httpx.AsyncClient(timeout=PROXY_S) as http:
        while True:
            try:
                answer = await http.get(f"{settings.proxy.rstrip('/')}/readyz")
                if answer.is_success and answer.json().get("models"):
                    return
            except (httpx.TransportError, ValueError):
                pass  # a proxy that restarts: the trials themselves would have to wait for it
            if not said:
                say(f"no worker serves a model at {settings.proxy} yet: waiting for one")
            said = True
            await asyncio.sleep(SERVED_S)


def about_trainer(prepared: Prepared, view: RunView) -> str | None:
    """Who will train what is rolled out, for people; None: nobody is to."""
    return trainer_of(view) if prepared.settings.purpose == "train" else None
