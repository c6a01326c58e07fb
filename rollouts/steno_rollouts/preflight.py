"""What is looked at before the first group is registered: is the proxy there and does the key open the run, is the command there
for trials, is there a trainer, does a worker serve a model. The rest only a trial can show: the first one runs alone until its
first turn (`groups/first_turns.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec

from steno.client.client import AsyncClient
from steno.contracts.chat import Sampling
from steno.contracts.errors import ConfigError, StenoError, Unreachable
from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno.contracts.runs.leases import RunView
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.admission import trainer_of
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import fill
from steno_rollouts.trials.executor import CannotStart, Exit, TrialJob
from steno_rollouts.trials.harbor.executor import HarborExecutor
from steno_rollouts.trials.play import RunnerOptions
from steno_rollouts.trials.ray.player import RayPlayer

PROXY_S = 2.5
"""How long an answer of the proxy may take before the operator is told that there is none."""
DOCUMENT_S = 60.0
"""For its OpenAPI document, which it first has to make: a second of a processor that others may use too."""
PATIENCE_S = 30.0
"""For a proxy that is being started."""
COMMAND_S = 60.0
SERVED_S = 0.5
"""Between two looks at whether a worker serves a model."""
_FIND = 'case $1 in */*) [ -f "$1" ] && [ -x "$1" ] ;; *) command -v -- "$1" >/dev/null 2>&1 ;; esac'
"""`command -v` is not asked about a path: that of dash also accepts a file that may not be executed."""


async def check_proxy(prepared: Prepared, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> RunView:
    """The run as the proxy has it. Says within 3 s that there is no answer, and goes on asking for a while.

    Raises: Unreachable: none came. Forbidden, Unauthorized: the key does not open the run.
    """
    settings = prepared.settings
    until, said = time.monotonic() + patience_s, False
    async with AsyncClient(settings.proxy, settings.key, timeout_s=PROXY_S, retries=0) as client:
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


def check_sampling(settings: RolloutSettings) -> None:
    """Raises: ConfigError: with this `sampling` no token of a group with purpose `train` could be trained (I1). Fields that the
    proxy does not know, or values out of range, are left to it."""
    for name, value in settings.sampling.items() if settings.purpose == "train" else ():
        with contextlib.suppress(msgspec.ValidationError):
            if not msgspec.convert({name: value}, Sampling, strict=False).is_plain():
                raise ConfigError(
                    f"sampling: {name}: got {value!r}: with this value no token can be trained; leave it out, or evaluate "
                    "(--purpose eval)",
                    field="sampling",
                )


def about_group_size(settings: RolloutSettings) -> list[str]:
    """What the operator must be told of `group_size`: groups of one trial can't be trained by rewards."""
    if settings.purpose != "train" or settings.group_size > 1:
        return []
    return [
        "group_size: got 1, must be at least 2 for training by rewards: a reward is compared with the others of its group. steno "
        "train can train groups of one trial only with --objective sft or --distillation"
    ]


async def check_nodes(prepared: Prepared, say: Callable[[str], None]) -> None:
    """Do what `check_command` does on each node of Ray's that could take a trial, and check that the proxy is reached there. If
    there is no such node yet, check the first that has room.

    Raises: ConfigError naming the nodes where trials can't run, and why; or as `check_work_dir`.
    """
    settings, cluster = prepared.settings, prepared.ray
    assert cluster is not None
    await asyncio.to_thread(check_work_dir, settings.work_dir)
    cluster.join()
    player = RayPlayer(cluster, settings, prepared.run_id, prepared.harbor)
    url, task = await public_url(settings.proxy), prepared.tasks[0]
    nodes = cluster.nodes()
    rooms = [(node, node.room(cluster.wanted)) for node in nodes]
    fitting = [node for node, room in rooms if room != 0]
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in cluster.wanted.items())
    say(f"{cluster.where}: {len(fitting)} of {len(nodes)} nodes have {wanted} for a trial")
    looked = await asyncio.gather(*(player.look(task, url, node) for node in fitting))
    for each in looked:
        if each.gone:
            say(f"{each.node} is lost, and left out: {each.problem}")
    told = [each for each in looked if not each.gone]
    if not told:
        say("waiting for a node that has room for a trial (--ray-cpus, --ray-resources)")
        told = [await player.look(task, url, None)]
    if failed := [f"{each.node}: {each.problem}" for each in told if each.problem is not None]:
        raise ConfigError(
            f"trials can't run on {len(failed)} of {len(told)} nodes: " + "; ".join(failed), field="executor"
        )
    for warning in dict.fromkeys(f"{each.node}: {said}" for each in told for said in each.warnings):
        say(f"warning: {warning}")
    at_once = sum(room or 0 for _, room in rooms)
    if fitting and all(room is not None for _, room in rooms) and at_once < settings.trials_at_once:
        say(
            f"there is room for {at_once} trials at a time, and in_flight is {settings.trials_at_once}: the others wait in Ray"
        )


def check_work_dir(folder: Path) -> None:
    """Make it, if it is not there. Blocking. Raises: ConfigError: trials can't have their folders in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="steno-preflight-", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"work_dir: got {str(folder)!r}, must be a folder that this user can write to: {error.strerror}",
            field="work_dir",
        ) from None


NODES = "All nodes must reach --proxy, and what the proxy gives in trials' URLs (its --public-url)"
ASKED_HERE = (
    "The model is asked from this machine, at trials' URLs: set the proxy's --public-url to an address that it reaches"
)


async def check_reach(url: str, wanted: str = NODES, *, patience_s: float = PATIENCE_S) -> None:
    """One answer that is late says little of a busy machine: it is asked again for a while.

    Args: wanted: what the operator is told. Raises: Unreachable: the proxy does not answer at `url`, as seen from this machine.
    """
    until = time.monotonic() + patience_s
    async with httpx.AsyncClient(timeout=PROXY_S) as http:
        while True:
            try:
                answer = await http.get(f"{url}/healthz")
                if answer.is_success:
                    return
                said = f"status {answer.status_code}"
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
                if isinstance(error, httpx.TimeoutException) and time.monotonic() < until:
                    continue
            raise Unreachable(f"the proxy can't be reached: GET {url}/healthz failed: {said}. {wanted}")


async def check_command(prepared: Prepared) -> None:
    """Look for the command where a trial of the first task would: with its environment, in its folder, confined as it is, or in
    its container. With Harbor: set up a sandbox of the first task, with its agent. With verifiers: look at the folder alone.
    Where the model is asked from here, and not from a sandbox: is the proxy reached where it is asked?

    Raises: ConfigError: it is not there, or may not be run; as `check_work_dir`. Unreachable: the proxy is not reached where the
    model is asked from.
    """
    settings, task = prepared.settings, prepared.tasks[0]
    await asyncio.to_thread(check_work_dir, settings.work_dir)
    if prepared.verifiers is not None or (prepared.harbor is not None and prepared.harbor.pointing.where == "launcher"):
        await check_reach(await public_url(settings.proxy), ASKED_HERE)
    if prepared.harbor is not None:
        harbor = HarborExecutor(prepared.harbor, settings, run_id=prepared.run_id)
        await harbor.check(task, await public_url(settings.proxy))
        return
    if prepared.verifiers is not None:
        return  # nothing of it is a command; its sandboxes begin with the first trial, which runs alone
    name = f"steno-preflight-{secrets.token_hex(4)}"
    folder = settings.work_dir / name
    session = Session(trial_id=name, created_at=0.0, updated_at=0.0)
    url = f"{settings.proxy.rstrip('/')}/{name}"
    trial = Trial(session=session, urls=dict.fromkeys(("openai", "anthropic", "gemini"), url))
    executor = prepared.executor()
    try:
        inherited = RunnerOptions((), folder).inherited
        work, variables = await executor.prepare(folder, trial, task, inherited)
        program = fill(prepared.command[:1], task, variables)[0]
        find = ["/bin/sh", "-c", _FIND, "sh", program]
        ended = await executor.run(TrialJob(name, find, variables, folder, work, COMMAND_S, task, url))
    except (CannotStart, OSError) as error:  # of a task's file that can't be read, say: as the runner has it of a trial
        ended = Exit(None, error=str(error))
    finally:
        await asyncio.to_thread(workdir.remove, folder)
    if ended.code is None or ended.timed_out:
        raise ConfigError(
            f"command: a trial can't be started here: {ended.error or f'a shell did not end within {COMMAND_S:g} s'}",
            field="command",
        )
    if ended.code:
        absent = "there is no such program, or it is not executable (chmod +x)"
        where = absent if "/" in program else "not found on the PATH of trials"
        if prepared.engine is not None:
            raise ConfigError(f"command: {program}: {where}, in the image of task {task.task_id!r}", field="command")
        hidden = " (confined: what --private and --confine hide is not there)" if prepared.confinement else ""
        path = "" if "/" in program else f", {variables.get('PATH', '')}"
        raise ConfigError(f"command: {program}: {where}{path}{hidden}", field="command")


async def public_url(proxy: str) -> str:
    """Where agents reach the proxy, as it says; where it names no address, that of these rollouts.

    Raises: Unreachable: it does not say. Another address must not be looked at in place of the one that trials get."""
    document = f"{proxy.rstrip('/')}/openapi.json"
    async with httpx.AsyncClient(timeout=DOCUMENT_S) as http:
        try:
            said = (await http.get(document)).json()
        except httpx.TransportError as error:
            raise Unreachable(
                f"no answer from the proxy: GET {document}: {str(error) or type(error).__name__}"
            ) from None
        except ValueError:
            return proxy.rstrip("/")
    parts = urlsplit(proxy)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    named = [str(server.get("url")).replace("{host}", str(host)) for server in said.get("servers", [])]
    found = [urljoin(proxy, url) for url in named if url.startswith(("http", "//"))]
    return (found[-1] if found else proxy).rstrip("/")


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
