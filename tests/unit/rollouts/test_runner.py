"""What a trial that reached its time limit is worth. The executor and the proxy are played: a real one would have to wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.client.client import AsyncSteno
from steno.contracts.records import Counts, Session
from steno.contracts.rest import Completion, Trial
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.reward import RewardFunction
from steno_rollouts.trials.runner import TrialRunner

REWARDS = """
def stalled(exit_code):
    assert exit_code is None
    return {"reward": -0.5, "half": 1}

def silent():
    return None

def broken(exit_code):
    return 1 / exit_code
"""


class Stalls(Executor):
    """An `Executor` of a command that never ends by itself. files: what it has left in its working folder."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    async def run(self, job: TrialJob) -> Exit:
        for name, text in self._files.items():
            (job.workdir / name).write_text(text)
        return Exit(-15, timed_out=True)

    async def clear(self, folder: Path) -> None:
        pass


async def outcome(
    folder: Path, *, turns: int, reward: str | None = None, timeout_reward: float | None = None, **files: str
) -> Completion:
    session = Session(trial_id="g.0", group_id="g", created_at=0.0, updated_at=0.0, counts=Counts(turns=turns))
    posted: list[Completion] = []

    async def recorded(trial_id: str) -> Session:
        return session

    async def complete(trial_id: str, end: Completion) -> Session:
        posted.append(end)
        return session.model_copy(update=end.model_dump(exclude={"metrics"}))

    (folder / "score.py").write_text(REWARDS)
    client = cast(AsyncSteno, SimpleNamespace(session=recorded, complete=complete))
    function = RewardFunction(f"{folder / 'score.py'}:{reward}") if reward else None
    options = RunnerOptions(("agent",), "http://proxy", folder / "trials", timeout_s=3, timeout_reward=timeout_reward)
    urls = {"openai": "o", "anthropic": "a", "gemini": "g"}
    trial = Trial(session=session, urls=urls)
    results: list[TrialResult] = []
    left = {name.replace("_", "."): text for name, text in files.items()}
    player = ExecutorPlayer(client, Stalls(left), options, function)
    await TrialRunner(client, player, options).run(Assignment(trial, Task("t", {}), "epoch-0"), results.append)
    assert len(posted) == len(results) == 1
    return posted[0]


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
    ],
)
async def test_a_trial_that_stalls_is_scored_once_it_has_had_a_turn(
    tmp_path: Path, given: dict[str, Any], reward: float | None
) -> None:
    posted = await outcome(tmp_path, **given)
    assert posted.reward == reward and posted.end_reason == "timeout"
    assert posted.status == ("aborted" if reward is None else "completed")
    assert posted.metrics.get("half") == (1.0 if reward == -0.5 else None)


async def test_a_function_that_fails_leaves_it_unscored(tmp_path: Path) -> None:
    posted = await outcome(tmp_path, turns=1, reward="broken", timeout_reward=-1.0)
    assert (posted.reward, posted.end_reason, posted.status) == (None, "reward_error", "completed")
