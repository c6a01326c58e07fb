"""What becomes of a trial by how it ended. The executor and the proxy are played: a real one would have to wait."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Gone, NotFound, StenoError
from steno.contracts.records import Counts, Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import play
from steno_rollouts.trials.containers.engine import ContainerEngine
from steno_rollouts.trials.containers.executor import ContainerExecutor
from steno_rollouts.trials.containers.sandbox import Sandbox
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, Player, RunnerOptions
from steno_rollouts.trials.reward import RewardFunction
from steno_rollouts.trials.runner import ClaimLost, TrialRunner
from tests.unit.rollouts.nobody import as_nobody

REWARDS = """
def stalled(exit_code):
    assert exit_code is None
    return {"reward": -0.5, "half": 1}

def silent():
    return None

def broken(exit_code):
    return 1 / exit_code
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "SETTLE_S", 0.0)


STALLED = Exit(-15, timed_out=True)


class Stalls(Executor):
    """An `Executor` of a command that never ends by itself. files: what it has left in its working folder. ended: another end."""

    def __init__(self, files: dict[str, str], ended: Exit = STALLED) -> None:
        self._files = files
        self._ended = ended

    async def run(self, job: TrialJob) -> Exit:
        for name, text in self._files.items():
            (job.workdir / name).write_text(text)
        return self._ended

    async def clear(self, folder: Path) -> None:
        pass


class LeavesAReadOnlyFolder(Executor):
    """An `Executor` of a command that succeeds, and leaves one in its working folder, as Go's module cache is."""

    async def run(self, job: TrialJob) -> Exit:
        (job.workdir / "reward.txt").write_text("1")
        (job.workdir / "mod").mkdir()
        (job.workdir / "mod" / "file").touch()
        (job.workdir / "mod").chmod(0o555)
        return Exit(0)

    async def clear(self, folder: Path) -> None:
        pass


class Says(Player):
    """A `Player` whose attempts come to this. left: what can't be ended of what earlier rollouts left."""

    def __init__(self, verdict: CommandOutcome, left: str = "") -> None:
        self._verdict = verdict
        self._left = left

    async def play(self, assignment: Assignment, folder: Path) -> tuple[Exit, CommandOutcome]:
        return Exit(0), self._verdict

    async def clear(self, folder: Path) -> None:
        if self._left:
            raise CannotStart(self._left)


class Proxy:
    """One trial of it, and what was posted of that. late: its turns are not on record when it is asked for the first time."""

    def __init__(self, turns: int, *, late: bool = False, created_at: float = 0.0) -> None:
        self._late = late
        counts = Counts(turns=turns)
        self.session = Session(trial_id="g.0", group_id="g", created_at=created_at, updated_at=0.0, counts=counts)
        self.posted: list[Completion] = []
        self.client = cast(AsyncClient, SimpleNamespace(session=self._recorded, complete=self._complete))
        trial = Trial(session=self.session, urls={"openai": "o", "anthropic": "a", "gemini": "g"})
        self.assignment = Assignment(trial, Task("t", {}), "epoch-0")

    async def _recorded(self, trial_id: str) -> Session:
        if self._late:
            self._late = False
            return self.session.model_copy(update={"counts": Counts()})
        return self.session

    async def _complete(self, trial_id: str, end: Completion) -> Session:
        self.posted.append(end)
        return self.session.model_copy(update=end.model_dump(exclude={"metrics"}))

    async def ran(self, player: Player, options: RunnerOptions) -> TrialResult:
        results: list[TrialResult] = []
        await TrialRunner(self.client, player, options).run(self.assignment, results.append)
        assert len(self.posted) == len(results) == 1
        return results[0]


def options_of(folder: Path, **more: Any) -> RunnerOptions:
    return RunnerOptions(("agent",), folder / "trials", timeout_s=3, **more)


async def outcome(
    folder: Path, *, turns: int, reward: str | None = None, timeout_reward: float | None = None, **files: str
) -> Completion:
    (folder / "score.py").write_text(REWARDS)
    proxy, options = Proxy(turns), options_of(folder, timeout_reward=timeout_reward)
    function = RewardFunction(f"{folder / 'score.py'}:{reward}") if reward else None
    left = {name.replace("_", "."): text for name, text in files.items()}
    await proxy.ran(ExecutorPlayer(proxy.client, Stalls(left), options, function), options)
    return proxy.posted[0]


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        ({"turns": 1}, None),
        ({"turns": 1, "timeout_reward": -1.0}, -1.0),
        ({"turns": 0, "timeout_reward": -1.0}, None),
        ({"turns": 1, "reward": "stalled"}, -0.5),
        ({"turns": 1, "reward": "stalled", "timeout_reward": -1.0}, -0.5),
        ({"turns": 0, "reward": "stalled", "timeout_reward": -1.0}, None),
        ({"turns": 1, "reward": "silent"}, None),
        ({"turns": 1, "reward": "silent", "timeout_reward": -1.0}, -1.0),
        ({"turns": 1, "reward_txt": "0.25", "timeout_reward": -1.0}, 0.25),
        ({"turns": 1, "reward_txt": "no number", "timeout_reward": -1.0}, -1.0),
        ({"turns": 0, "reward_txt": "no number", "timeout_reward": -1.0}, None),
        ({"turns": 0, "reward_txt": "0.25"}, None),
        ({"turns": 0, "reward_txt": "no number"}, None),
    ],
)
async def test_a_trial_that_stalls_is_scored_once_it_has_had_a_turn(
    tmp_path: Path, given: dict[str, Any], reward: float | None
) -> None:
    posted = await outcome(tmp_path, **given)
    assert posted.reward == reward and posted.end_reason == "timeout"
    assert posted.status == ("aborted" if reward is None else "completed")
    assert posted.metrics.get("half") == (1.0 if reward == -0.5 else None)


@pytest.mark.parametrize(("ended", "held"), [(Exit(1), True), (Exit(0), False)])
async def test_a_reward_file_counts_without_a_turn_only_where_the_command_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Exit, held: bool
) -> None:
    """`echo 0 > reward.txt; agent`, and there is no such agent: what fails so is tried again, and stops the rollouts."""
    monkeypatch.setattr("steno_rollouts.trials.runner.SETTLE_S", 0.0)
    proxy, options, results = Proxy(turns=0), options_of(tmp_path), list[TrialResult]()
    player = ExecutorPlayer(proxy.client, Stalls({"reward.txt": "0"}, ended), options)
    failed = await TrialRunner(proxy.client, player, options).run(proxy.assignment, results.append, hold=True)
    assert (failed is not None and (failed.verdict.reason, failed.attempts)) == (held and (EndReason.EXIT_CODE, 2))
    assert [result.reward for result in results] == ([] if held else [0.0])


async def test_a_container_without_a_turn_is_not_scored_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("0")
    sandbox = Sandbox("a/b:1", None, 1.0, 64, None, 1.0)
    containers = ContainerExecutor(ContainerEngine("docker", False), "r", {"t": sandbox}, "python")
    job = TrialJob("g.0", ["agent"], {}, tmp_path, tmp_path, task=Task("t", {}))
    assert await containers.verify(job, played=False) is None


@pytest.mark.parametrize(
    ("ended", "function", "reward"),
    [
        (STALLED, None, -1.0),
        (STALLED, "stalled", -0.5),
        (Exit(1), "half", 0.5),
    ],
)
async def test_a_trial_that_ends_in_its_first_turn_is_scored_though_that_is_recorded_late(
    tmp_path: Path, ended: Exit, function: str | None, reward: float
) -> None:
    (tmp_path / "score.py").write_text(REWARDS + "def half():\n    return 0.5\n")
    scores = RewardFunction(f"{tmp_path / 'score.py'}:{function}") if function else None
    proxy, options = Proxy(turns=1, late=True), options_of(tmp_path, timeout_reward=-1.0)
    await proxy.ran(ExecutorPlayer(proxy.client, Stalls({}, ended), options, scores), options)
    assert (proxy.posted[0].reward, proxy.posted[0].status) == (reward, "completed")


@pytest.mark.parametrize("files", [{"reward.json": '{"reward": null, "half": 1}'}, {}])
@pytest.mark.parametrize("function", ["silent", None])
async def test_a_command_that_failed_and_that_nothing_scores_is_aborted(
    tmp_path: Path, function: str | None, files: dict[str, str]
) -> None:
    (tmp_path / "score.py").write_text(REWARDS)
    scores = RewardFunction(f"{tmp_path / 'score.py'}:{function}") if function else None
    proxy, options = Proxy(turns=1), options_of(tmp_path)
    await proxy.ran(ExecutorPlayer(proxy.client, Stalls(files, Exit(3)), options, scores), options)
    posted = proxy.posted[0]
    assert (posted.reward, posted.end_reason, posted.status) == (None, "exit_code", "aborted")
    assert posted.metrics.get("half") == (1.0 if files and not function else None)


async def test_a_function_that_fails_leaves_it_unscored(tmp_path: Path) -> None:
    posted = await outcome(tmp_path, turns=1, reward="broken", timeout_reward=-1.0)
    assert (posted.reward, posted.end_reason, posted.status) == (None, "reward_error", "completed")


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"\ud800": 1.0}, "reward: metrics: got the name '\\ud800', must be one that can be stored"),
        ({str(number): 1.0 for number in range(60_000)}, "must be at most 262144 bytes of JSON"),
    ],
)
async def test_metrics_that_no_proxy_takes_leave_their_trial_unscored_whoever_gave_them(
    tmp_path: Path, metrics: dict[str, float], said: str
) -> None:
    proxy = Proxy(turns=1)
    result = await proxy.ran(Says(CommandOutcome(EndReason.COMPLETED, 1.0, metrics)), options_of(tmp_path))
    posted = proxy.posted[0]
    assert (posted.reward, posted.end_reason, list(posted.metrics)) == (None, "reward_error", ["rollout/wall_s"])
    assert said in result.detail


def test_a_read_only_folder_that_a_trial_leaves_is_removed(tmp_path: Path) -> None:
    def work() -> None:
        proxy, options = Proxy(turns=1), options_of(Path())
        player = ExecutorPlayer(proxy.client, LeavesAReadOnlyFolder(), options)
        result = asyncio.run(proxy.ran(player, options))
        assert result.reward == 1.0 and result.folder is None and not list(Path("trials").iterdir())

    as_nobody(work, tmp_path)


async def test_a_folder_that_can_not_be_removed_is_kept_and_its_trial_ends_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(16, "Device or resource busy", str(folder))

    folder = tmp_path / "trials" / "g.0"
    folder.mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", refuses)
    with caplog.at_level(logging.WARNING):
        result = await Proxy(turns=1).ran(Says(CommandOutcome(EndReason.COMPLETED, 1.0)), options_of(tmp_path))
    assert result.reward == 1.0 and result.folder == str(folder)
    assert f"{folder} can't be removed, and is kept" in caplog.text and "Device or resource busy" in caplog.text


async def test_a_trial_that_is_cancelled_while_its_end_is_posted_has_that_end(tmp_path: Path) -> None:
    """Nobody else ends it: it would stay open, and its group run on for ever."""
    proxy, posting, answered = Proxy(turns=1), asyncio.Event(), asyncio.Event()
    complete, results = proxy.client.complete, []

    async def answered_late(trial_id: str, end: Completion) -> Session:
        posting.set()
        await answered.wait()
        return await complete(trial_id, end)

    proxy.client.complete = answered_late  # type: ignore[method-assign]
    runner = TrialRunner(proxy.client, Says(CommandOutcome(EndReason.COMPLETED, 1.0)), options_of(tmp_path))
    running = asyncio.create_task(runner.run(proxy.assignment, results.append))
    await posting.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(result.end_reason, result.reward) for result in results] == [("completed", 1.0)]
    assert [end.reward for end in proxy.posted] == [1.0]


async def test_a_trial_is_given_up_also_where_what_it_left_can_not_be_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, left = Proxy(turns=1), "processes 7, 8 can't be ended"
    runner = TrialRunner(proxy.client, Says(CommandOutcome(EndReason.COMPLETED), left), options_of(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert (await runner.abandon(proxy.assignment, EndReason.INTERRUPTED)).end_reason == "interrupted"
    assert left in caplog.text


@pytest.mark.parametrize("taken", [{"status": "open"}, {"status": "completed", "awaits_reward": True}])
async def test_a_trial_that_another_launcher_has_is_not_told_of_also_where_its_limit_has_ended_it(
    tmp_path: Path, taken: dict[str, Any]
) -> None:
    proxy, results = Proxy(turns=1), []
    proxy.session = proxy.session.model_copy(update=taken)

    async def refused(*_: object) -> Session:
        raise Conflict("claim: session g.0 was claimed by another launcher meanwhile", field="claim")

    proxy.client.complete = refused  # type: ignore[method-assign]
    runner = TrialRunner(proxy.client, Says(CommandOutcome(EndReason.COMPLETED, 1.0)), options_of(tmp_path))
    with pytest.raises(ClaimLost):
        await runner.run(proxy.assignment, results.append)
    assert results == []


@pytest.mark.parametrize("error", [Gone("session g.0 is closed"), NotFound("no session g.0")])
@pytest.mark.parametrize("reason", [EndReason.COMPLETED, EndReason.EXIT_CODE])
async def test_a_trial_that_was_deleted_has_ended_and_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StenoError, reason: EndReason
) -> None:
    """Also one that its limit had ended: it awaits no reward any more."""
    monkeypatch.setattr("steno_rollouts.trials.runner.SETTLE_S", 0.0)
    proxy, results = Proxy(turns=1), []
    limited = proxy.session.model_copy(update={"status": "completed", "awaits_reward": True})
    proxy.assignment = replace(proxy.assignment, trial=proxy.assignment.trial.model_copy(update={"session": limited}))

    async def deleted(*_: object) -> Session:
        raise error

    proxy.client.complete = proxy.client.session = deleted  # type: ignore[method-assign]
    await TrialRunner(proxy.client, Says(CommandOutcome(reason)), options_of(tmp_path)).run(
        proxy.assignment, results.append
    )
    assert [(result.status, result.end_reason, result.reward) for result in results] == [("deleted", "deleted", None)]
