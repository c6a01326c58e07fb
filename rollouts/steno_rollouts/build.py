"""Rollouts as the settings say: the parts of `harness`, put together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from steno.client.client import AsyncClient
from steno.contracts.errors import BadRequest, ConfigError, NotFound
from steno.contracts.records import Limits, SamplingPolicy
from steno_rollouts.calls.patience import PatientClient
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.admission import Admission, InHand
from steno_rollouts.groups.claims import Claims
from steno_rollouts.groups.plan import GroupOptions, Observer
from steno_rollouts.harness import Rollouts
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.tasks.task import Task, load_tasks
from steno_rollouts.trials.command import check_command
from steno_rollouts.trials.confine import CannotConfine, Confinement, hidden_paths
from steno_rollouts.trials.containers.engine import ContainerEngine
from steno_rollouts.trials.containers.executor import ContainerExecutor
from steno_rollouts.trials.containers.sandbox import Sandbox, sandboxes
from steno_rollouts.trials.executor import Executor
from steno_rollouts.trials.group_reward import GroupRewardFunction
from steno_rollouts.trials.harbor.executor import HarborExecutor
from steno_rollouts.trials.harbor.plan import HarborPlan, harbor_plan
from steno_rollouts.trials.local import LocalExecutor
from steno_rollouts.trials.play import ExecutorPlayer, Player, RunnerOptions
from steno_rollouts.trials.ray.cluster import RayCluster
from steno_rollouts.trials.ray.player import RayPlayer
from steno_rollouts.trials.reward import RewardFunction
from steno_rollouts.trials.runner import TrialRunner
from steno_rollouts.trials.scoring import reward_file, task_source
from steno_rollouts.trials.verifiers.executor import VerifiersExecutor
from steno_rollouts.trials.verifiers.plan import VerifiersPlan, verifiers_plan

log = logging.getLogger(__name__)

CLIENT_RETRIES = 8
"""Of each call to the proxy, with growing pauses: half a minute, in which a proxy that restarts is back."""


UNCONFINED = (
    "trials are not isolated: they can read your files, this process's environment, key files and other trials' folders"
)
ADMIN_KEY = "and with them the admin key: use the run's own key instead (steno runs key RUN), and unset STENO_ADMIN_KEY"
NO_KEYS = "the proxy has no keys: a trial can post any reward, for itself and for others"


def confinement(settings: RolloutSettings, environment: Mapping[str, str]) -> tuple[Confinement | None, list[str]]:
    """How trials are confined, and what the operator must be told of it. Raises: ConfigError: `confine` is `require`, and
    trials can't be confined."""
    warnings = [NO_KEYS] if settings.key is None else []
    admin = "STENO_ADMIN_KEY" in environment or (settings.key is not None and not settings.is_run_key)
    among = f", {ADMIN_KEY}" if admin else ""
    if settings.confine == "off":
        return None, [*warnings, f"{UNCONFINED} (--confine off){among}"]
    given = [*settings.private, *settings.secret_files.values()]
    if settings.file is not None:
        given.append(settings.file)
    for function in (settings.reward, settings.group_reward):
        given += reward_file(function, settings.command)
    source = task_source(settings.tasks, settings.command)
    try:
        return Confinement.of(hidden_paths(environment, given), settings.work_dir, source), warnings
    except CannotConfine as error:
        if settings.confine == "require":
            raise ConfigError(f"confine: {error}", field="confine") from None
        return None, [*warnings, f"{UNCONFINED}: {error}{among}"]


def located(command: Sequence[str]) -> tuple[str, ...]:
    """The command, with a relative path of its program made absolute, since trials run in folders of their own. A path that does
    not exist here stays relative: the task may bring the program."""
    program, *words = command or ("",)
    path = Path(program)
    if "/" in program and not path.is_absolute() and path.exists():
        program = str(path.resolve())
    return (program, *words) if command else ()


@dataclass(frozen=True)
class Prepared:
    """Settings, tasks and functions, checked before anything runs. `rollouts` makes a `Rollouts` from it and a client."""

    settings: RolloutSettings
    run_id: str
    tasks: list[Task]
    reward: RewardFunction | None
    confinement: Confinement | None = None
    warnings: tuple[str, ...] = ()
    engine: ContainerEngine | None = None
    sandboxes: Mapping[str, Sandbox] = field(default_factory=dict)
    harbor: HarborPlan | None = None
    verifiers: VerifiersPlan | None = None
    ray: RayCluster | None = None
    group_reward: GroupRewardFunction | None = None

    @classmethod
    def of(cls, settings: RolloutSettings, run_id: str, *, needs_command: bool = True) -> Prepared:
        """Raises: ConfigError: tasks, command or reward functions are not what they should be."""
        found = cls._of(settings, run_id, needs_command)
        if settings.group_reward is None:
            return found
        return replace(found, group_reward=GroupRewardFunction(settings.group_reward, settings.reward_timeout_s))

    @classmethod
    def _of(cls, settings: RolloutSettings, run_id: str, needs_command: bool) -> Prepared:
        if settings.executor != "ray":  # on Ray, the path is one on each node
            settings = settings.model_copy(update={"work_dir": settings.work_dir.expanduser().absolute()})
        selection = TaskSelection.of(settings.filter, settings.limit, settings.shuffle_seed)
        ray = RayCluster(settings) if settings.executor == "ray" else None
        if settings.harbor is not None:
            plan, tasks, warnings = harbor_plan(settings, settings.harbor, selection)
            said = [NO_KEYS] if settings.key is None else []
            return cls(settings, run_id, tasks, None, warnings=(*said, *warnings), harbor=plan, ray=ray)
        if settings.verifiers is not None:
            brought, tasks, warnings = verifiers_plan(settings, settings.verifiers, selection)
            said = [NO_KEYS] if settings.key is None else []
            return cls(settings, run_id, tasks, None, warnings=(*said, *warnings), verifiers=brought)
        assert settings.tasks is not None
        tasks = load_tasks(settings.tasks, hide=settings.hide, split=settings.split, selection=selection)
        if needs_command or settings.command:
            check_command(settings.command, tasks)
        reward = RewardFunction(settings.reward, settings.reward_timeout_s) if settings.reward else None
        if ray is not None:  # how trials are confined, and whether an engine is there, only a node can say
            in_containers = sandboxes(tasks, settings) if settings.runner != "local" else {}
            said = [NO_KEYS] if settings.key is None and not in_containers else []
            return cls(settings, run_id, tasks, reward, warnings=tuple(said), ray=ray)
        return cls._here(settings, run_id, tasks, reward)

    @classmethod
    def on_node(cls, settings: RolloutSettings, run_id: str, task: Task, harbor: HarborPlan | None) -> Prepared:
        """For one task, on a node of Ray's. Args: settings: `executor` is what its trials run in. Raises: ConfigError."""
        if harbor is not None:
            return cls(settings, run_id, [task], None, harbor=harbor)
        reward = RewardFunction(settings.reward, settings.reward_timeout_s) if settings.reward else None
        return cls._here(settings, run_id, [task], reward)

    @classmethod
    def _here(
        cls, settings: RolloutSettings, run_id: str, tasks: list[Task], reward: RewardFunction | None
    ) -> Prepared:
        if settings.executor != "local":
            engine = ContainerEngine.named(settings.executor)
            return cls(settings, run_id, tasks, reward, engine=engine, sandboxes=sandboxes(tasks, settings))
        confined, warnings = confinement(settings, os.environ)
        return cls(settings, run_id, tasks, reward, confined, tuple(warnings))

    def executor(self, client: AsyncClient | None = None) -> Executor:
        """Args: client: by which the proxy is told of steps; not needed to look whether trials can run. Raises: ConfigError."""
        settings = self.settings
        if self.ray is not None:
            raise ConfigError(
                "executor: got 'ray', must be local, docker or podman: here, trials run on this machine",
                field="executor",
            )
        if self.harbor is not None:
            begin_step = None if client is None else client.begin_task_step
            return HarborExecutor(self.harbor, settings, begin_step, run_id=self.run_id)
        if self.verifiers is not None:
            return VerifiersExecutor(self.verifiers, settings, run_id=self.run_id)
        if self.engine is None:
            return LocalExecutor(settings.grace_s, self.confinement)
        return ContainerExecutor(self.engine, self.run_id, self.sandboxes, settings.forwarder_image, settings.grace_s)

    @property
    def command(self) -> tuple[str, ...]:
        """In an image, paths mean what they mean there."""
        return located(self.settings.command) if self.engine is None else tuple(self.settings.command)

    def options(self) -> RunnerOptions:
        settings = self.settings
        return RunnerOptions(
            command=self.command,
            work_dir=settings.work_dir,
            timeout_s=settings.timeout_s,
            timeout_reward=settings.timeout_reward,
            retries=settings.retries,
            scored_together=settings.group_reward is not None,
            keep=settings.keeps,
        )

    def player(self, client: AsyncClient, executor: Executor | None = None) -> Player:
        """Who plays attempts. Args: executor: default: as the settings say."""
        if self.ray is not None and executor is None:
            return RayPlayer(self.ray, self.settings, self.run_id, self.harbor)
        return ExecutorPlayer(client, executor or self.executor(client), self.options(), self.reward)

    def client(self, *, patient: bool = False) -> AsyncClient:
        """Args: patient: wait without a limit for a proxy that is away (`calls/patience.py`); and in `rollouts`, new groups wait
        for room in a full store."""
        if patient:
            return PatientClient(self.settings.proxy, self.settings.key)
        return AsyncClient(self.settings.proxy, self.settings.key, retries=CLIENT_RETRIES)

    async def say_over(self, client: AsyncClient) -> None:
        """Tell the proxy that no more groups come: a trainer need not wait. Not for an evaluation, which no trainer awaits."""
        if self.settings.purpose != "train":
            return
        try:
            await client.rollouts_over(self.run_id)
        except (BadRequest, NotFound):
            log.info(
                "the proxy is of a release that can't be told that rollouts are over: the trainer may go on waiting"
            )

    def rollouts(
        self,
        client: AsyncClient,
        *,
        executor: Executor | None = None,
        in_hand: InHand | None = None,
        observers: Sequence[Observer] = (),
        claims: Claims | None = None,
    ) -> Rollouts:
        """Args: executor: default: as the settings say. in_hand: as in `Rollouts`. claims: default: of this process."""
        settings = self.settings
        runner = TrialRunner(client, self.player(client, executor), self.options())
        groups = GroupOptions(
            run_id=self.run_id,
            size=settings.trials_of_group,
            purpose=settings.purpose,
            in_flight=settings.in_flight,
            sequential=settings.sequential,
            sampling=SamplingPolicy(force=settings.sampling),
            limits=Limits(max_turns=settings.max_turns, max_tokens=settings.max_tokens),
            deadline_s=settings.deadline_s,
            resumable=settings.run is not None,
            stop_after_failures=settings.stop_after_failures,
            fork_of=settings.forked_from,
            needed=settings.group_size if settings.spare_trials else None,
        )
        admission = Admission(settings.groups_per_step, settings.max_staleness_steps)
        return Rollouts(
            client, runner, groups, admission=admission, in_hand=in_hand, observers=observers,
            claims=claims or Claims(client), group_reward=self.group_reward, patient=isinstance(client, PatientClient),
        )  # fmt: skip
