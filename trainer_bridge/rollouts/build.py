"""Rollouts as the settings say: the parts of `harness`, put together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.client import AsyncSteno
from proxy.contracts.errors import ConfigError
from proxy.contracts.records import Limits, SamplingPolicy
from trainer_bridge.rollouts.admission import Admission, InHand
from trainer_bridge.rollouts.command import check_command
from trainer_bridge.rollouts.config import RolloutSettings
from trainer_bridge.rollouts.confine import CannotConfine, Confinement, hidden_paths
from trainer_bridge.rollouts.executor import Executor
from trainer_bridge.rollouts.harness import GroupOptions, Observer, Rollouts
from trainer_bridge.rollouts.local import LocalExecutor
from trainer_bridge.rollouts.reward import RewardFunction
from trainer_bridge.rollouts.runner import RunnerOptions, TrialRunner
from trainer_bridge.rollouts.tasks import Task, load_tasks

CLIENT_RETRIES = 8
"""Of each call to the proxy, with growing pauses: half a minute, in which a proxy that restarts is back."""


UNCONFINED = "trials can read everything of yours: the environment of this process, key files, other trials' folders"
NO_KEYS = "the proxy asks for no key: a trial can post rewards, its own among them"


def confinement(settings: RolloutSettings, environment: Mapping[str, str]) -> tuple[Confinement | None, list[str]]:
    """How trials are confined, and what the operator must be told of it. Raises: ConfigError: `require`, and it can't be."""
    warnings = [NO_KEYS] if settings.key is None else []
    if settings.confine == "off":
        return None, [*warnings, f"{UNCONFINED} (--confine off)"]
    given = [*settings.private, *settings.secret_files.values()]
    if settings.file is not None:
        given.append(settings.file)
    try:
        return Confinement.of(hidden_paths(environment, given), settings.work_dir), warnings
    except CannotConfine as error:
        if settings.confine == "require":
            raise ConfigError(f"confine: {error}", field="confine") from None
        return None, [*warnings, f"{UNCONFINED}: {error}"]


def located(command: Sequence[str]) -> tuple[str, ...]:
    """A program that is given by a relative path means the one that is there now: trials run in folders of their own. One that is
    not there is left as it is: the task may bring it."""
    program, *words = command or ("",)
    path = Path(program)
    if "/" in program and not path.is_absolute() and path.exists():
        program = str(path.resolve())
    return (program, *words) if command else ()


@dataclass(frozen=True)
class Prepared:
    """What could be checked before anything runs. `rollouts` makes of it, with a client, what runs."""

    settings: RolloutSettings
    run_id: str
    tasks: list[Task]
    reward: RewardFunction | None
    confinement: Confinement | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: RolloutSettings, run_id: str, *, needs_command: bool = True) -> Prepared:
        """Raises: ConfigError: tasks, command or reward function are not what they should be."""
        tasks = load_tasks(settings.tasks, hide=settings.hide)
        if needs_command or settings.command:
            check_command(settings.command, tasks)
        reward = RewardFunction(settings.reward, settings.reward_timeout_s) if settings.reward else None
        confined, warnings = confinement(settings, os.environ)
        return cls(settings, run_id, tasks, reward, confined, tuple(warnings))

    def client(self) -> AsyncSteno:
        return AsyncSteno(self.settings.proxy, self.settings.key, retries=CLIENT_RETRIES)

    def rollouts(
        self,
        client: AsyncSteno,
        *,
        executor: Executor | None = None,
        in_hand: InHand | None = None,
        observers: Sequence[Observer] = (),
    ) -> Rollouts:
        """Args: executor: default: processes of this machine. in_hand: as in `Rollouts`."""
        settings = self.settings
        options = RunnerOptions(
            command=located(settings.command),
            proxy_url=settings.proxy,
            work_dir=settings.work_dir,
            timeout_s=settings.timeout_s,
            timeout_reward=settings.timeout_reward,
            retries=settings.retries,
            keep=settings.keep,
        )
        executor = executor or LocalExecutor(settings.grace_s, self.confinement)
        runner = TrialRunner(client, executor, options, self.reward)
        groups = GroupOptions(
            run_id=self.run_id,
            size=settings.group_size,
            purpose=settings.purpose,
            in_flight=settings.in_flight,
            sequential=settings.sequential,
            sampling=SamplingPolicy(force=settings.sampling),
            limits=Limits(max_turns=settings.max_turns, max_tokens=settings.max_tokens),
            deadline_s=settings.deadline_s,
            resumable=settings.run is not None,
        )
        admission = Admission(settings.groups_per_step, settings.max_staleness_steps)
        return Rollouts(client, runner, groups, admission=admission, in_hand=in_hand, observers=observers)
