"""Trials as trials of Harbor's: an `Executor` that starts the driver (`driver.py`) once for each.

One process for each trial, with the trial's own configuration: nothing of one trial is in another's memory, and the end of the
process is the end of all that Harbor runs on this machine for it. Harbor tries nothing again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from steno.contracts.errors import ConfigError, Unreachable
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import NO_KEY
from steno_rollouts.trials.containers.engine import EngineError
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.harbor.interpreter import DRIVER, environment
from steno_rollouts.trials.harbor.kubernetes.fleet import Fleet, PodsError
from steno_rollouts.trials.harbor.leftovers import Leftovers
from steno_rollouts.trials.harbor.outcome import FAILED, HarborOutcome
from steno_rollouts.trials.harbor.plan import HarborPlan, modes
from steno_rollouts.trials.harbor.pointing import Addresses
from steno_rollouts.trials.harbor.task_steps import NotTold, TaskSteps
from steno_rollouts.trials.harbor.tasks import STEPS
from steno_rollouts.trials.local import LocalExecutor
from steno_rollouts.trials.play import DEFAULT_TIMEOUT_S

log = logging.getLogger(__name__)

FOLDER = "harbor"
"""Of a trial's folder: what Harbor keeps of it, by its own name for the trial."""
ANSWER = "answer.json"
NO_ALLOWLIST = (
    " (--allow-only-proxy: with Docker and Podman, Harbor also says this if it can't pull the image "
    "that it checks for nftables with)"
)
NO_LIMIT = 1e6
"""Times Harbor's limit for a sandbox to start: a pod has its own (start_timeout_s), which does not count a queue's time."""
REMOVAL_S = 60.0
"""For Harbor to remove its sandboxes, before these rollouts do so themselves."""


def harbor_name(trial_id: str) -> str:
    """Harbor's name for a trial: sandboxes are named after it, and such names are short."""
    return f"steno-{blake2b(trial_id.encode(), digest_size=10).hexdigest()}"


class HarborExecutor(Executor):
    """An `Executor`. Args: begin_step: tells the proxy which step of its task a trial is at: by the names of both. run_id: of
    these rollouts."""

    def __init__(
        self,
        plan: HarborPlan,
        settings: RolloutSettings,
        begin_step: Callable[[str, str], Awaitable[object]] | None = None,
        *,
        run_id: str = "",
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._begin_step = begin_step
        self._processes = LocalExecutor(max(settings.grace_s, REMOVAL_S))
        self._leftovers = Leftovers.of(settings.environment)
        self._fleet = Fleet(plan.python.python, plan.kubernetes, run_id) if plan.kubernetes is not None else None
        self._addresses: dict[str, Addresses] = {}
        self._reached: set[str] = set()
        self._begun = 0
        self._steps: dict[str, TaskSteps] = {}
        self._left: dict[str, str] = {}

    async def prepare(
        self, folder: Path, trial: Trial, task: Task, inherited: Mapping[str, str]
    ) -> tuple[Path, dict[str, str]]:
        """The environment is that of Harbor's process; the agent's is in its configuration."""
        trial_id = trial.session.trial_id
        left = self._left.pop(trial_id, None)
        if left is not None and trial.api_key is None:
            raise CannotStart(f"pod {left} can't be ended, and on a proxy without keys it may go on with this trial")
        work = await workdir.written(workdir.begin, folder)
        self._addresses[trial_id] = Addresses(trial.urls, trial.api_key or NO_KEY)
        self._steps.pop(trial_id, None)
        if STEPS in task.fields and self._begin_step is not None:
            names = [step["name"] for step in task.fields[STEPS]]
            self._steps[trial_id] = TaskSteps(folder / "steps", names, partial(self._begin_step, trial_id))
        return work, environment(inherited, self._plan.python.python)

    async def run(self, job: TrialJob) -> Exit:
        """Raises: Unreachable: the proxy is not to be reached from the first sandbox, while there is no other: the others' would
        not reach it either. Later it is this sandbox's trouble (DNS, a network policy that is late): another attempt may do."""
        self._begun += 1
        origin = _origin(job.url)
        if origin in self._reached or self._plan.pointing.where == "launcher":
            return await self._run(job, ask=None)
        path = urlsplit(job.url).path.rstrip("/").rpartition("/")[0]
        try:
            ended = await self._run(job, f"{origin}{path}/healthz")
        except Unreachable as error:
            if self._begun == 1:
                raise
            return Exit(None, error=error.message)
        if ended.code is not None or ended.timed_out:
            self._reached.add(origin)
        return ended

    async def check(self, task: Task, url: str) -> None:
        """Before anything is registered: does the first task's sandbox start, is the agent there, and is `url` reached from it?

        Args: url: where agents reach the proxy. Raises: ConfigError, Unreachable.
        """
        name = f"steno-preflight-{secrets.token_hex(4)}"
        folder = self._settings.work_dir / name
        urls = {"openai": f"{url}/{name}/v1", "anthropic": f"{url}/{name}", "gemini": f"{url}/{name}"}
        self._addresses[name] = Addresses(urls, NO_KEY)
        try:
            if self._fleet is not None:
                await self._fleet.begun()
            work = await workdir.written(workdir.begin, folder)
            variables = environment(os.environ, self._plan.python.python)
            job = TrialJob(name, [], variables, folder, work, None, task, urls["anthropic"])
            asks = None if self._plan.pointing.where == "launcher" else f"{url}/healthz"
            ended = await self._run(job, asks, only_set_up=True)
        except PodsError as error:
            raise ConfigError(f"environment: kubernetes: {error.message}", field="environment") from None
        finally:
            await asyncio.to_thread(workdir.remove, folder)
            self.close()
        if ended.code != 0:
            hint = NO_ALLOWLIST if self._settings.allow_only_proxy and "network_mode='allowlist'" in ended.error else ""
            raise ConfigError(
                f"harbor: task {task.task_id!r}: its sandbox can't be set up: {ended.error}{hint}", field="harbor"
            )

    async def verify(self, job: TrialJob, played: bool) -> CommandOutcome | None:
        """What Harbor's verifier gave."""
        found = await asyncio.to_thread(HarborOutcome.read, job.folder / ANSWER)
        if found is None or not played:
            return None
        return found.worth(self._settings.reward_key)

    async def clear(self, folder: Path) -> None:
        """A pod on a lost node stays until the node comes back: whoever is in it has no key for the next attempt."""
        await self._processes.clear(folder)
        await self._leftovers.remove(harbor_name(folder.name))
        if self._fleet is not None:
            try:
                left = await self._fleet.clear(folder.name, wait=True)
            except PodsError as error:
                raise CannotStart(error.message) from None
            if left:
                self._left[folder.name] = left[0]

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    async def _run(self, job: TrialJob, ask: str | None, *, only_set_up: bool = False) -> Exit:
        asked = (job.folder / "request.json").absolute()  # the driver starts in another folder
        request = self._request(job, ask, only_set_up)
        with open(os.open(asked, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123, ASYNC230
            json.dump(request, file)
        command = [str(self._plan.python.python), "-I", str(DRIVER), str(asked)]
        try:
            variables = {**job.environment, **request["config"]["agent"]["env"]}
            steps = self._steps.get(job.trial_id)
            async with steps.told() if steps is not None else contextlib.nullcontext():
                ended = await self._processes.run(replace(job, command=command, environment=variables, timeout_s=None))
        except NotTold as error:
            return await asyncio.to_thread(_untold, job, error)
        finally:
            self._addresses.pop(job.trial_id, None)
            self._steps.pop(job.trial_id, None)
            asked.unlink(missing_ok=True)
            await self._remove_leftovers(job.trial_id)
            if self._fleet is not None:
                await self._remove_pods(self._fleet, job.trial_id)
            await asyncio.to_thread(shutil.rmtree, job.folder / "task", ignore_errors=True)
        found = await asyncio.to_thread(HarborOutcome.read, job.folder / ANSWER)
        if found is None:
            said = await asyncio.to_thread(workdir.last_line, job.stderr)
            return Exit(None, error=said or ended.error or f"Harbor's process ended with exit code {ended.code}")
        if found.unreachable is not None:
            raise Unreachable(
                f"the proxy can't be reached from the sandbox of {job.trial_id}: GET {ask} from inside it "
                f"({self._settings.environment}) failed: {found.unreachable}. Trials' URLs have this address: set the proxy's "
                "--public-url to one that sandboxes reach"
            )
        if found.error:
            with contextlib.suppress(OSError), job.stderr.open("a") as stderr:
                stderr.write(f"\n{found.error}\n")
        return replace(found.exit, image=found.image)

    async def _remove_leftovers(self, trial_id: str) -> None:
        """What Harbor could not remove. What stays is ended by the next attempt."""
        try:
            await self._leftovers.remove(harbor_name(trial_id))
        except EngineError as error:
            log.warning("%s: its containers may be left: %s", trial_id, error.message)

    async def _remove_pods(self, fleet: Fleet, trial_id: str) -> None:
        """Those that Harbor could not remove. What stays is ended by the next attempt, the next start, or its deadline."""
        try:
            await fleet.clear(trial_id, wait=False)
        except PodsError as error:
            log.warning("%s: its pods may be left: %s", trial_id, error.message)

    def _request(self, job: TrialJob, ask: str | None, only_set_up: bool) -> dict[str, Any]:
        settings, plan, task = self._settings, self._plan, job.task
        assert task is not None and task.folder is not None
        agent = plan.pointing.agent(self._addresses[job.trial_id], settings.agent_model)
        named = {"import_path": plan.agent} if plan.agent_file is not None else {"name": plan.agent}
        config = {
            "task": {"path": str(job.folder.absolute() / "task" / task.folder.name)},
            "trial_name": harbor_name(job.trial_id),
            "trials_dir": str(job.folder.absolute() / FOLDER),
            "install_only": only_set_up,
            "agent": {
                **named,
                **agent,
                "kwargs": {**agent["kwargs"], **settings.agent_options},
                "resume_trajectory": settings.resume_steps,
                "override_timeout_sec": settings.timeout_s,
            },
            "environment": {"type": settings.environment, "kwargs": settings.environment_options},
            "artifacts": settings.artifacts,
        }
        if self._fleet is not None:
            given = self._fleet.of(job.trial_id, harbor_name(job.trial_id))
            config["environment"] = {"type": settings.environment, "kwargs": {"steno": given}}
            config["environment_build_timeout_multiplier"] = NO_LIMIT
        return {
            "do": "trial",
            "parent": os.getpid(),
            "answer": str(job.folder.absolute() / ANSWER),
            "task": str(task.folder),
            "config": config,
            "timeout_s": job.timeout_s or DEFAULT_TIMEOUT_S,
            "modes": modes(task, settings),
            "only_host": urlsplit(job.url).hostname if settings.allow_only_proxy else None,
            "agent_file": str(plan.agent_file) if plan.agent_file else None,
            "in_image": settings.agent_in_image,
            "steps": str(job.folder.absolute() / "steps") if job.trial_id in self._steps else None,
            "ask": ask,
        }


def _untold(job: TrialJob, error: NotTold) -> Exit:
    """The end of a trial that was ended before a step's agent. What earlier steps were worth is not what it was worth."""
    (job.folder / ANSWER).unlink(missing_ok=True)
    with contextlib.suppress(OSError), job.stderr.open("a") as stderr:
        stderr.write(f"\n{error.message}\n")
    return Exit(FAILED) if error.began else Exit(None, error=error.message)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
