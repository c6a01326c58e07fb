"""A trial that is not needed any more: its attempt has ended before anything else is done, whoever cancels what meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.records import Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import runner, workdir
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.play import Assignment, Player, RunnerOptions
from steno_rollouts.trials.runner import FailedTrial, TrialRunner
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)


class Dies(Player):
    """An attempt that has a while to end once it is cancelled, and none once it is cancelled again."""

    def __init__(self) -> None:
        self.begun = 0
        self.runs = False
        self.cancelled = 0
        self.dead = asyncio.Event()

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        self.begun += 1
        self.runs = True
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
            try:
                await self.dead.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
            self.runs = False
        raise AssertionError

    async def clear(self, folder: Path) -> None: ...


class FailsEarly(Player):
    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        return Exit(127), CommandOutcome(EndReason.EXIT_CODE, detail="exit code 127")

    async def clear(self, folder: Path) -> None: ...


class Ran:
    def __init__(self, player: Player, folder: Path) -> None:
        self.session = Session(trial_id="g.0", group_id="g", created_at=0.0, updated_at=0.0)
        self.told: list[TrialResult] = []
        self.not_needed = asyncio.Event()
        client = cast(AsyncClient, SimpleNamespace(session=self._recorded, complete=self._complete))
        self._runner = TrialRunner(client, player, RunnerOptions(("agent",), folder, inherited={}))
        self._assignment = Assignment(Trial(session=self.session, urls={}), Task("t", {}), "epoch-0")

    async def _recorded(self, trial_id: str) -> Session:
        return self.session

    async def _complete(self, trial_id: str, end: Completion) -> Session:
        return self.session.model_copy(update={"status": end.status, "end_reason": end.end_reason})

    def start(self, *, hold: bool = False) -> asyncio.Task[FailedTrial | None]:
        return asyncio.create_task(
            self._runner.run(self._assignment, self.told.append, hold=hold, not_needed=self.not_needed)
        )

    @property
    def reasons(self) -> list[str]:
        return [one.end_reason for one in self.told]


async def test_it_has_the_time_to_end_that_any_other_has(tmp_path: Path) -> None:
    player = Dies()
    ran = Ran(player, tmp_path)
    running = ran.start()
    await until(lambda: player.runs)
    ran.not_needed.set()
    await until(lambda: player.cancelled == 1)
    assert player.runs and not running.done() and ran.told == []
    player.dead.set()
    assert await running is None and ran.reasons == ["spare"] and not player.runs


@pytest.mark.parametrize("stops", [1, 2, 3])
async def test_nothing_runs_any_more_once_it_is_told_of_however_often_it_is_cancelled(
    tmp_path: Path, stops: int
) -> None:
    """The first Ctrl-C, or the failure of another trial, while it ends as a spare one leaves it that time; a second does not."""
    player = Dies()
    ran = Ran(player, tmp_path)
    running = ran.start()
    await until(lambda: player.runs)
    ran.not_needed.set()
    await until(lambda: player.cancelled == 1)
    for _ in range(stops):
        running.cancel()
        await asyncio.sleep(0)
    if stops == 1:
        for _ in range(5):
            await asyncio.sleep(0)
        assert player.runs and ran.told == []
        player.dead.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not player.runs and player.cancelled == min(stops, 2) and ran.reasons == ["cancelled"]


async def test_ctrl_c_ends_one_that_is_needed_as_ever(tmp_path: Path) -> None:
    player = Dies()
    ran = Ran(player, tmp_path)
    running = ran.start()
    await until(lambda: player.runs)
    running.cancel()
    await until(lambda: player.cancelled == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not player.runs and player.cancelled == 2 and ran.reasons == ["cancelled"]


async def test_one_that_was_not_needed_before_it_began_does_not_begin(tmp_path: Path) -> None:
    player = Dies()
    ran = Ran(player, tmp_path)
    ran.not_needed.set()
    assert await ran.start() is None
    assert player.begun == 0 and ran.reasons == ["spare"]


@pytest.mark.parametrize("needed", [True, False])
async def test_one_that_fails_early_is_held_only_if_it_is_needed(tmp_path: Path, needed: bool) -> None:
    ran = Ran(FailsEarly(), tmp_path)

    class Late(FailsEarly):
        async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
            if not needed:
                ran.not_needed.set()
            return await super().play(assignment, folder)

    cast(Any, ran._runner)._player = Late()
    failed = await ran.start(hold=True)
    assert (failed is not None) is needed and ran.reasons == ([] if needed else ["spare"])


async def test_a_folder_is_not_written_into_once_its_writer_was_cancelled(tmp_path: Path) -> None:
    going, go = threading.Event(), threading.Event()

    def write() -> None:
        going.set()
        go.wait(30)
        (tmp_path / "late").touch()

    writing = asyncio.create_task(workdir.written(write))
    await until(going.is_set)
    for _ in range(2):
        writing.cancel()
        await asyncio.sleep(0)
    assert not writing.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert (tmp_path / "late").exists()
