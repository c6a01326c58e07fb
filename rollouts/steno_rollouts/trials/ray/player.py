"""Attempts as tasks of Ray's: a `Player`. What starts them again is the runner's rule alone, here as for any other.

A node or a process that is lost takes its attempts with it. Such an attempt has ended as `interrupted`, and the runner asks the
proxy whether there is a turn on record: if there is none, the trial is tried again, wherever there is room.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steno.contracts.errors import BY_CODE, ConfigError, StenoError
from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome, EndReason
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.executor import CannotStart, Exit
from steno_rollouts.trials.harbor.plan import HarborPlan
from steno_rollouts.trials.play import Assignment, Player
from steno_rollouts.trials.ray.cluster import Node, RayCluster, in_a_line
from steno_rollouts.trials.ray.parcels import OF_A_NODE, Answer, Keys, NodeRequest, SentFile, packed
from steno_rollouts.trials.scoring import reward_file

log = logging.getLogger(__name__)

CANCEL_S = 90.0
"""For a node to end an attempt, beside the time that its command is given: Harbor removes sandboxes, engines containers."""
FOLDERS = 32
"""Tasks whose folders Ray keeps for the next of their trials."""
WHERE = "node.txt"
"""In a trial's folder here: on which node its working folder is, and where."""


@dataclass(frozen=True)
class NodeSaid:
    """Of a node that was looked at. problem: why trials can't run there; None: they can. gone: it is lost meanwhile."""

    node: str
    problem: str | None
    warnings: tuple[str, ...] = ()
    gone: bool = False


class RayPlayer(Player):
    """Args: cluster: it is joined when the first attempt begins, at the latest."""

    def __init__(
        self, cluster: RayCluster, settings: RolloutSettings, run_id: str, harbor: HarborPlan | None = None
    ) -> None:
        """Raises: ConfigError: a file of the user's is not there."""
        self._cluster = cluster
        # On a file system that nodes share these are there, too, and hidden from trials (`trials/scoring.py`).
        tasks = settings.tasks.absolute() if settings.tasks is not None else None
        private = list(settings.private)
        for function in (settings.reward, settings.group_reward):
            private += reward_file(function, settings.command)
        self._settings = settings.model_copy(update={"key": None, "tasks": tasks, "private": private})
        self._run_id = run_id
        self._harbor = harbor
        self._reward = _sent(Path(settings.reward.rpartition(":")[0])) if settings.reward else None
        self._agent = _sent(harbor.agent_file) if harbor is not None and harbor.agent_file is not None else None
        self._folders: OrderedDict[Path, Any] = OrderedDict()

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        await asyncio.to_thread(_make, folder)
        self._cluster.join()
        trial = assignment.trial
        request = replace(
            self._request(assignment.task),
            trial=trial.model_copy(update={"api_key": None}),
            round=assignment.round,
        )
        try:
            sent = await self._folder(assignment.task)
        except CannotStart as error:
            return _ended(EndReason.START_FAILED, error.message)
        started = self._start(trial.session.trial_id, Keys(trial.api_key, assignment.harness_key), request, sent)
        try:
            answer = await self._answer(started)
        except StenoError:
            raise
        except Exception as error:  # Ray's own, of many kinds
            lost = self._cluster.lost(error)
            if lost is None:
                return _ended(EndReason.START_FAILED, in_a_line(error))
            return _ended(EndReason.INTERRUPTED, f"lost on its node: {lost}")
        if answer.problem is not None:
            code, message = answer.problem
            said = f"node {answer.node}: {message}"
            if code in {kind.code for kind in OF_A_NODE}:  # it came later, and was not looked at
                return _ended(EndReason.START_FAILED, said)
            raise {**BY_CODE, workdir.FolderInUse.code: workdir.FolderInUse}.get(code, StenoError)(said)
        try:
            await asyncio.to_thread(_write, folder, answer)
        except OSError as error:  # a full disk, say: the attempt has ended all the same
            log.warning("%s: its output is not kept here: %s", assignment.trial_id, error)
        assert answer.outcome is not None
        return answer.exit, answer.outcome

    async def clear(self, folder: Path) -> None:
        """Nothing: Ray ends the tasks of rollouts that were killed, and with a task ends its attempt."""

    async def look(self, task: Task, public_url: str, node: Node | None) -> NodeSaid:
        """Whether a trial of `task` could run on a node. Args: node: None: on the first that has room."""
        trial = Trial(session=Session(trial_id="steno-preflight", created_at=0.0, updated_at=0.0), urls={})
        request = replace(self._request(task), do="check", trial=trial, public_url=public_url)
        where = "a node" if node is None else f"node {node.address}"
        try:
            sent = await self._folder(task)
            answer = await self._answer(
                self._start("steno-preflight", Keys(), request, sent, None if node is None else node.node_id)
            )
        except Exception as error:  # Ray's own, of many kinds
            return NodeSaid(where, in_a_line(error), gone=node is not None and self._cluster.gone(error))
        problem = None if answer.problem is None else answer.problem[1]
        return NodeSaid(f"node {answer.node}", problem, answer.warnings)

    def _request(self, task: Task) -> NodeRequest:
        return NodeRequest(
            "play", self._settings, self._run_id, task, harbor=self._harbor, reward=self._reward, agent=self._agent
        )

    def _start(self, name: str, keys: Keys, request: NodeRequest, folder: Any, node_id: str | None = None) -> Any:
        clear = pickle.dumps(replace(request, do="clear"))
        return self._cluster.start(name, pickle.dumps(keys), pickle.dumps(request), clear, folder, node_id)

    async def _folder(self, task: Task) -> Any:
        """The task's folder as Ray has it; None: the task has none. Raises: CannotStart: it is too large, or can't be read."""
        if task.folder is None:
            return None
        found = self._folders.pop(task.folder, None)
        if found is None:
            try:
                archive = await asyncio.to_thread(packed, task.folder)
            except OSError as error:
                raise CannotStart(f"{task.folder}: {error.strerror or error}") from None
            found = await asyncio.to_thread(self._cluster.kept, archive)
        self._folders[task.folder] = found
        while len(self._folders) > FOLDERS:
            self._folders.popitem(last=False)
        return found

    async def _answer(self, started: Any) -> Answer:
        """Cancelled: so is the task; cancelled again: without time to end."""
        waited = asyncio.ensure_future(_received(started))
        try:
            return await asyncio.shield(waited)
        except asyncio.CancelledError:
            self._cluster.cancel(started)
            try:
                await asyncio.wait({waited}, timeout=self._settings.grace_s + CANCEL_S)
            finally:
                if not waited.done():
                    self._cluster.cancel(started, force=True)
                waited.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise


async def _received(started: Any) -> Answer:
    answer = pickle.loads(await started)
    assert isinstance(answer, Answer)
    return answer


def _sent(path: Path) -> SentFile:
    try:
        return SentFile.of(path.expanduser())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _ended(reason: EndReason, detail: str) -> tuple[Exit, CommandOutcome]:
    """Of an attempt of which no more is known."""
    return Exit(None, error=detail), CommandOutcome(reason, detail=detail)


def _make(folder: Path) -> None:
    workdir.remove(folder)
    folder.mkdir(parents=True)


def _write(folder: Path, answer: Answer) -> None:
    (folder / "stdout.log").write_bytes(answer.stdout)
    (folder / "stderr.log").write_bytes(answer.stderr)
    if answer.folder is not None:
        (folder / WHERE).write_text(f"{answer.node}:{answer.folder}\n")
