"""Trials as episodes of verifiers': an `Executor`. They run in this process, as verifiers itself runs them; what its agents'
programs run in (a container, a sandbox, a process) is of the environment's configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.verifiers.outcome import exit_of, problem_of, worth
from steno_rollouts.trials.verifiers.plan import VerifiersPlan
from steno_rollouts.trials.verifiers.serving import Environments

log = logging.getLogger(__name__)

RECORD = "episode.json"
"""Of a trial's folder: verifiers' own record of it, without tokens."""
RUN_VARIABLE = "VF_RUN_ID"
"""By which verifiers names its sandboxes."""


@dataclass
class _Played:
    """traces: all that were begun. complete: verifiers takes the episode's result."""

    traces: list[Any] = field(default_factory=list)
    episode: Any = None
    complete: bool = False


class VerifiersExecutor(Executor):
    """Args: run_id: of these rollouts."""

    def __init__(self, plan: VerifiersPlan, settings: RolloutSettings, *, run_id: str = "") -> None:
        os.environ.setdefault(RUN_VARIABLE, run_id)
        self._plan = plan
        self._settings = settings
        self._environments = Environments(plan.environment)
        self._clients: dict[str, tuple[str, str | None]] = {}
        self._complete: dict[str, Any] = {}

    async def prepare(
        self, folder: Path, trial: Trial, task: Task, inherited: Mapping[str, str]
    ) -> tuple[Path, dict[str, str]]:
        """No command runs: there is no environment for one."""
        work = await workdir.written(workdir.begin, folder)
        self._clients[trial.session.trial_id] = trial.urls["openai"], trial.api_key
        return work, {}

    async def run(self, job: TrialJob) -> Exit:
        played, limit = _Played(), asyncio.timeout(job.timeout_s)
        try:
            async with limit:
                await self._play(job, played)
        except TimeoutError as error:
            if limit.expired():
                return Exit(None, timed_out=True)
            return Exit(None, error=f"TimeoutError: {error}")
        except (
            Exception,
            SystemExit,
        ) as error:  # what an episode raises is in it: of an environment that can't serve, or of hooks
            ended = exit_of(played.traces, False, f"{type(error).__name__}: {error}")
        else:
            ended = exit_of(played.traces, played.complete, problem_of(played.episode))
        if ended.code == 0:
            self._complete[job.trial_id] = played.episode
        try:
            await asyncio.to_thread(_keep, job, played.episode, ended.error)
        except Exception as error:  # a task's notes that are no JSON, a full disk: the trial has ended all the same
            log.warning(
                "trial %s: verifiers' record of it was not kept: %s: %s", job.trial_id, type(error).__name__, error
            )
        return ended

    async def verify(self, job: TrialJob, played: bool) -> CommandOutcome | None:
        episode = self._complete.pop(job.trial_id, None)
        if episode is None or not played:
            return None
        try:
            return worth(episode, self._settings.reward_key)
        except (TypeError, ValueError, OverflowError) as error:  # of what a task's own code wrote into a trace
            raise RewardError(f"verifiers: {type(error).__name__}: {error}") from error

    async def clear(self, folder: Path) -> None:
        """verifiers ends what an episode runs, also of one that is cancelled. What rollouts that were killed have left is not
        known here."""

    async def _play(self, job: TrialJob, played: _Played) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        assert job.task is not None
        task = self._plan.given[job.task.task_id]
        url, key = self._clients.pop(job.trial_id)
        with _variable(job.trial_id, key) as name:
            client = EvalClientConfig(base_url=url, api_key_var=name)
            context = ModelContext(model=self._settings.agent_model, client=client)
            async with self._environments.lent() as environment:
                played.episode = await environment.run_episode(task, context, on_trace=played.traces.append)
                played.complete = environment.complete(played.episode)


@contextlib.contextmanager
def _variable(trial_id: str, key: str | None) -> Iterator[str]:
    """The name of a variable that has the trial's key: verifiers takes keys from nowhere else, and keeps variables of such names
    from the processes that it starts. Another key has another name: what was read by a name is kept."""
    digest = blake2b(f"{trial_id}\0{key}".encode(), digest_size=8).hexdigest().upper()
    name = f"STENO_TRIAL_{digest}_API_KEY"
    if key is not None:
        os.environ[name] = key
    try:
        yield name
    finally:
        os.environ.pop(name, None)


def _keep(job: TrialJob, episode: Any, problem: str) -> None:
    """Args: episode: None: there was no end of it. problem: the last line of what the trial is said to have printed."""
    errors = (
        [] if episode is None else [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    )
    if problem:
        with job.stderr.open("a", encoding="utf-8", errors="backslashreplace") as stderr:
            stderr.writelines(f"{error.traceback}\n" for error in errors if error.traceback)
            stderr.write(f"{problem}\n")
    if episode is not None:
        (job.folder / RECORD).write_text(json.dumps(episode.to_record()), encoding="utf-8")
