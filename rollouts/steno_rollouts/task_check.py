"""Whether tasks can be solved, and are not solved by nobody: each is run by an oracle, which must score 1, and by a command that
does nothing, which must score 0. Without a proxy: no model is asked, and containers have no network.

The oracle is the task's `solution/solve.sh`; or a command, which is told all fields of the task, withheld ones too. What the
oracle prints stands for the last reply of a transcript.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from steno.contracts.errors import ConfigError, StenoError
from steno.contracts.records import Session, Turn
from steno.contracts.rest import Trial
from steno_rollouts.build import Prepared, located
from steno_rollouts.harness import first_failure
from steno_rollouts.outcome import CommandOutcome, RewardError
from steno_rollouts.preflight import check_work_dir
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import check_command, fill
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.local import LocalExecutor
from steno_rollouts.trials.play import DEFAULT_TIMEOUT_S, RunnerOptions
from steno_rollouts.trials.reward import FinishedTrial

Who = Literal["oracle", "nobody"]
WANTED: Mapping[Who, float] = {"oracle": 1.0, "nobody": 0.0}
SOLUTION = "solution"
SOLVE = "solve.sh"
NOWHERE = "http://127.0.0.1:9"
"""In the place of a trial's address: nothing answers there."""
_NOTHING = ("/bin/sh", "-c", ":")
_TEMPLATE = re.compile(r"\$\{(\w+)\}", re.ASCII)


class NoOracle(StenoError):
    """A task that nobody says how to solve. Never leaves this module."""

    code = "no_oracle"


@dataclass(frozen=True)
class Verdict:
    """What came of one run. reward: None: nothing says. why: for people; "" where there is nothing to add. folder: where its
    working folder and output were kept; None: removed."""

    who: Who
    reward: float | None
    why: str = ""
    folder: Path | None = None

    @property
    def holds(self) -> bool:
        return self.reward == WANTED[self.who]


@dataclass(frozen=True)
class CheckedTask:
    task: Task
    verdicts: Sequence[Verdict]

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)


class PrintedTranscript:
    """Of a run that asked no model: what it printed, as the last reply."""

    def __init__(self, stdout: Path) -> None:
        self._stdout = stdout

    @property
    def session(self) -> Session:
        raise RewardError("transcript.session: not there in steno tasks check, where no proxy is asked")

    @property
    def turns(self) -> list[Turn]:
        return []

    @property
    def last_reply(self) -> str:
        return self._stdout.read_text(errors="replace").strip() if self._stdout.exists() else ""


class TaskCheck:
    """Args: oracle: a command for all tasks; empty: each one's `solution/solve.sh`."""

    def __init__(self, prepared: Prepared, oracle: Sequence[str] = ()) -> None:
        """Raises: ConfigError: a placeholder of `oracle` that some task has no field for; an executor that is elsewhere."""
        self._prepared = prepared
        if prepared.ray is not None:
            raise ConfigError(
                "executor: got 'ray', must be local, docker or podman: tasks are checked on this machine",
                field="executor",
            )
        if oracle:
            check_command(oracle, map(_with_hidden, prepared.tasks))
        self._oracle = tuple(oracle) if prepared.engine is not None else located(oracle)
        local = LocalExecutor(prepared.settings.grace_s)
        self._executor: Executor = prepared.executor() if prepared.engine is not None else local
        self._slots = asyncio.Semaphore(prepared.settings.trials_at_once)

    async def run(self, whom: Collection[Who], ended: Callable[[CheckedTask], None]) -> list[CheckedTask]:
        """All tasks, several at a time; `ended` is told of each. Returns: in the tasks' order.

        Cancelled: what runs is ended. Raises: ConfigError: the engine won't do; or as `check_work_dir`. OSError: a task's folder
        could not be made: a full disk, say.
        """

        async def one(task: Task) -> CheckedTask:
            verdicts = [await self._verdict(task, who) for who in whom]
            checked = CheckedTask(task, verdicts)
            ended(checked)
            return checked

        await asyncio.to_thread(check_work_dir, self._prepared.settings.work_dir)
        try:
            async with asyncio.TaskGroup() as running:
                found = [running.create_task(one(task)) for task in self._prepared.tasks]
        except BaseExceptionGroup as errors:
            raise first_failure(errors) from errors
        return [each.result() for each in found]

    async def _verdict(self, task: Task, who: Who) -> Verdict:
        async with self._slots:
            settings = self._prepared.settings
            folder = settings.work_dir / f"check-{os.getpid()}-{_digest(task)}-{who}"
            kept = settings.keeps == "all"
            try:
                try:
                    verdict = await self._played(task, who, folder)
                    ran = True
                except NoOracle as error:
                    verdict, ran = Verdict(who, None, error.message), False
                except (CannotStart, RewardError) as error:
                    verdict, ran = Verdict(who, None, error.message), True
                kept = kept or (settings.keeps == "failed" and ran and not verdict.holds)
            finally:
                there = await asyncio.to_thread(workdir.dispose, folder, kept)
            return replace(verdict, folder=folder if there else None)

    async def _played(self, task: Task, who: Who, folder: Path) -> Verdict:
        """Raises: CannotStart, RewardError, NoOracle."""
        trial = Trial(
            session=Session(trial_id=folder.name, created_at=0.0, updated_at=0.0),
            urls=dict.fromkeys(("openai", "anthropic", "gemini"), f"{NOWHERE}/{folder.name}"),
        )
        told = _with_hidden(task) if who == "oracle" and self._oracle else task
        work, variables = await self._executor.prepare(folder, trial, told, RunnerOptions((), folder).inherited)
        job = TrialJob(
            folder.name, _NOTHING, variables, folder, work, self._prepared.settings.timeout_s or task.timeout_s or
            DEFAULT_TIMEOUT_S, task,
        )  # fmt: skip
        if who == "oracle":
            job = await asyncio.to_thread(self._solving, job, told)
        ended = await self._executor.run(job)
        if ended.timed_out or ended.code is None:
            why = f"ended after {job.timeout_s:g} s" if ended.timed_out else ended.error
            return Verdict(who, None, why)
        outcome = await self._worth(job, ended)
        why = f"exit code {ended.code}" if ended.code else ""
        if ended.code and (said := await asyncio.to_thread(workdir.last_line, job.stderr)):
            why += f": {said}"
        if outcome is None:
            tests = "; tests/test.sh runs in containers only" if _has_tests(task) else ""
            return Verdict(who, None, why or f"no reward.json and no reward.txt{tests}")
        return Verdict(who, outcome.reward, "; ".join(filter(None, (why, outcome.detail))))

    def _solving(self, job: TrialJob, task: Task) -> TrialJob:
        """The job with the oracle's command. Raises: NoOracle."""
        if self._oracle:
            return replace(job, command=fill(self._oracle, task, job.environment))
        source = task.folder / SOLUTION if task.folder else None
        if source is None or not (source / SOLVE).is_file():
            raise NoOracle(f"no oracle: the task has no {SOLUTION}/{SOLVE}, and no command stands after --")
        copied = job.folder / SOLUTION
        workdir.copy_whole(source, copied, SOLVE)
        variables = {**job.environment, **_solution_variables(task)}
        inside = f"/{SOLUTION}" if self._prepared.engine is not None else str(copied)
        return replace(job, command=[f"{inside}/{SOLVE}"], environment=variables, given={f"/{SOLUTION}": copied})

    async def _worth(self, job: TrialJob, ended: Exit) -> CommandOutcome | None:
        """As of a trial. Raises: RewardError."""
        reward, task = self._prepared.reward, job.task
        assert task is not None
        if reward is None:
            return await self._executor.verify(job, played=True)
        transcript = PrintedTranscript(job.stdout)
        return await reward(
            FinishedTrial(task, job.workdir, ended.code, job.stdout, job.stderr, job.trial_id, transcript)
        )


def _with_hidden(task: Task) -> Task:
    """With nothing withheld."""
    return replace(task, fields={**task.fields, **task.hidden}, hidden={})


def _solution_variables(task: Task) -> dict[str, str]:
    """`[solution] env` of its task.toml; `${NAME}` is a variable of this process. Raises: NoOracle: which is not set."""
    section = task.field(SOLUTION)
    given: Any = section.get("env") if isinstance(section, Mapping) else None
    found = {}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        text = str(value)
        if (template := _TEMPLATE.fullmatch(text)) is not None:
            if template[1] not in os.environ:
                raise NoOracle(f"no oracle: {SOLUTION}.env: {name} is {text}, and {template[1]} is not set")
            text = os.environ[template[1]]
        found[str(name)] = text
    return found


def _has_tests(task: Task) -> bool:
    return task.folder is not None and (task.folder / "tests").is_dir()


def _digest(task: Task) -> str:
    return blake2b(task.task_id.encode(errors="surrogatepass"), digest_size=6).hexdigest()
