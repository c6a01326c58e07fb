"""What a function says of a group, and everything that is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.trials.group_reward import GroupRewardFunction, TrialOfGroup
from steno_rollouts.trials.transcript import RecordedTranscript
from tests.support.records.recordings import session

TRIALS = [
    TrialOfGroup(name, RecordedTranscript(session(name), []), own, {}, "completed")
    for name, own in (("g.0", 0.5), ("g.1", None))
]


def function(folder: Path, code: str, timeout_s: float = 60.0) -> GroupRewardFunction:
    path = folder / "score.py"
    path.write_text(code)
    return GroupRewardFunction(f"{path}:score", timeout_s)


async def judged(folder: Path, code: str) -> dict[str, CommandOutcome]:
    return await function(folder, code)("g", {"task_id": "t", "_answer": "42"}, None, TRIALS)


@pytest.mark.parametrize(
    "code",
    [
        "def score(trials): return [1, {'reward': 2, 'n': 3}]",
        "def score(trials): return (x for x in (1, {'reward': 2, 'metrics': {'n': 3}}))",
        "async def score(trials): return {'g.1': {'reward': 2, 'n': 3}, 'g.0': True}",
        "def score(**given):\n    assert sorted(given) == ['group_id', 'task', 'task_folder', 'trials']\n"
        "    return [1, {'reward': 2, 'n': 3}]",
        "def score(trials, task): return [len(trials) - 1, {'reward': 2, 'n': float(task['_answer']) - 39}]",
    ],
)
async def test_a_function_scores_each_in_order_or_by_name(tmp_path: Path, code: str) -> None:
    assert await judged(tmp_path, code) == {
        "g.0": CommandOutcome(EndReason.COMPLETED, 1.0), "g.1": CommandOutcome(EndReason.COMPLETED, 2.0, {"n": 3.0}),
    }  # fmt: skip


async def test_a_function_may_say_nothing_of_a_trial(tmp_path: Path) -> None:
    found = await judged(tmp_path, "def score(trials): return [one.reward for one in trials]")
    assert [(one.reward, one.reason) for one in found.values()] == [
        (0.5, EndReason.COMPLETED),
        (None, EndReason.NO_REWARD),
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(trials): return 1.0", "got 1.0, must be a list of 2 rewards, or a dict of them by trial_id"),
        ("def score(trials): return [1.0]", "got [1.0], must be a list of 2 rewards"),
        ("def score(trials): return 'ab'", "got 'ab', must be a list of 2 rewards"),
        ("def score(trials): return {1.0, 2.0}", "got {1.0, 2.0}, must be a list of 2 rewards"),
        ("def score(trials): raise TimeoutError('the judge')", "raised TimeoutError: the judge"),
        ("def score(trials): return None", "got None, must be a list of 2 rewards"),
        (
            "def score(trials): return {'g.0': 1, 'g.2': 1}",
            "got a dict with ['g.0', 'g.2'], must be a list of 2 rewards",
        ),
        ("def score(trials): return [1, float('nan')]", "score: g.1: reward: got nan, must be a finite number"),
        ("def score(trials): return [1, {'r': 1}]", "score: g.1: `reward` is missing"),
        ("def score(trials): return trials[2]", "raised IndexError"),
        ("def score(trials): return (1 / n for n in (1, 0))", "raised ZeroDivisionError"),
    ],
)
async def test_what_a_function_does_wrong_is_its_groups_error(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(RewardError, match=re.escape(said)):
        await judged(tmp_path, code)


async def test_a_function_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    code = "import time\ndef score(trials):\n    for one in trials:\n        time.sleep(60)\n        yield 1"
    slow = function(tmp_path, code, timeout_s=0.1)
    with pytest.raises(RewardError, match=r"no answer in 0\.1 s"):
        await slow("g", {}, None, TRIALS)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(task): return []", "score must take `trials`"),
        (
            "def score(trials, workdir): return []",
            "no such input: workdir; there are task, task_folder, group_id, trials",
        ),
    ],
)
def test_a_function_of_something_else_is_refused(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        function(tmp_path, code)
    assert refused.value.field == "group_reward"
