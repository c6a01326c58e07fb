"""`estimator: FILE.py:function`: what a user's function is given, what it may return, and when what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Reason
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.own_estimator import estimator_named
from steno_trainer.errors import BadBatch
from steno_trainer.run.main import check_beforehand
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import assemble
from tests.unit.trainer.data.test_overlong import TERMS, leased, spoken
from tests.unit.trainer.recorded import session
from tests.unit.trainer.run.test_config import settings

SHORTER = """
def shorter(group):
    mean = sum(group.rewards) / len(group.rewards)
    return [(reward - mean) * 100 / max(1, length) for reward, length in zip(group.rewards, group.lengths)]
"""


def own(folder: Path, text: str, function: str = "shorter") -> str:
    (folder / "own.py").write_text(text)
    return f"{folder / 'own.py'}:{function}"


def test_ours_are_theirs_by_name() -> None:
    assert [estimator_named(name) for name in Estimator] == list(Estimator)


def test_it_is_given_rewards_and_lengths_of_a_groups_scored_trials(tmp_path: Path) -> None:
    trials = [
        (session("g.1", reward=1.0), spoken((5, {}), (15, {}))),
        (session("g.0", reward=0.0), spoken((40, {}))),
        (session("g.2", reward=None), spoken((7, {}))),
        (session("g.3", reward=0.5), spoken((10, {}))),
    ]
    found = assemble([leased(*trials)], TERMS, estimator_named(own(tmp_path, SHORTER)), Overlong())
    assert found.batch.advantages == {"g.0": -0.5 * 100 / 40, "g.1": 0.5 * 100 / 20, "g.3": 0.0}


def test_the_length_penalty_is_in_the_rewards(tmp_path: Path) -> None:
    text = "def shorter(group):\n    return group.rewards\n"
    trials = [(session("g.0", reward=0.0), spoken((16, {}))), (session("g.1", reward=1.0), spoken((1, {})))]
    given = estimator_named(own(tmp_path, text))
    found = assemble([leased(*trials)], TERMS, given, Overlong(max_tokens=16, buffer_tokens=10))
    assert found.batch.advantages == {"g.0": -1.0, "g.1": 1.0}


def test_a_group_that_says_nothing_is_dropped_before(tmp_path: Path) -> None:
    given = estimator_named(own(tmp_path, "def shorter(group):\n    return [1.0] * len(group.rewards)\n"))
    alike = [ScoredTrial("a.0", "a", 1.0), ScoredTrial("a.1", "a", 1.0), ScoredTrial("b.0", "b", 0.0)]
    found = group_advantages([*alike, ScoredTrial("c.0", "c", 0.0), ScoredTrial("c.1", "c", 1.0)], given)
    assert found.dropped == {"a": Reason.ZERO_VARIANCE, "b": Reason.GROUP_TOO_SMALL}
    assert found.by_trial == {"c.0": 1.0, "c.1": 1.0}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return group.rewards[1:]", r"for rewards \[0.0, 1.0\] it returned 1 values, must be 2, one for each trial"),
        ("return 1.0", "it returned 1.0, must be a list of numbers, one for each trial"),
        ("return ['a', 'b']", "it returned .*, must be a list of numbers"),
        ("return [r / 0 for r in group.rewards]", "it raised ZeroDivisionError: float division by zero"),
        ("return [float('nan')] * len(group.rewards)", r"it returned \[nan, nan\], must be finite"),
        ("return group.reward", "it raised AttributeError"),
        ("yield from (r / 0 for r in group.rewards)", "it raised ZeroDivisionError"),
        ("return [10**400] * len(group.rewards)", r"it returned \[10.*, must be a list of numbers"),
        (
            "return [r / n for r, n in zip(group.rewards, group.lengths)]",
            r"for rewards \[0.0, 1.0, 1.0\] it raised ZeroDiv",
        ),
        (
            "import statistics as s\n    return [r / s.stdev(group.rewards) for r in group.rewards]",
            r"\[0.5, 0.5\] it raised",
        ),
    ],
)
def test_what_gives_no_advantages_is_said_before_anything_is_loaded(tmp_path: Path, body: str, said: str) -> None:
    name = own(tmp_path, f"def shorter(group):\n    {body}\n")
    with pytest.raises(ConfigError, match=said) as error:
        check_beforehand(RunSettings(model="m", run="r", estimator=name))
    assert error.value.field == "estimator" and name in error.value.message


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        ("import nothing_such\n", "f", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("def g(group): ...\n", "f", "has no function 'f'; it has g"),
    ],
)
def test_a_file_without_that_function_is_named(tmp_path: Path, text: str, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check_beforehand(RunSettings(model="m", run="r", estimator=own(tmp_path, text, function)))
    assert error.value.field == "estimator"


@pytest.mark.parametrize("name", ["ppo", "own.py", "own.py:", "own.txt:f", "a.py:b.c", ""])
def test_a_name_that_is_none_is_refused_by_the_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be grpo, grpo_batch_std, .* or FILE\.py:function"):
        settings(estimator=name).check()


def test_what_goes_wrong_later_stops_the_step_with_the_rewards(tmp_path: Path) -> None:
    text = "def shorter(group):\n    return list(group.rewards) if max(group.rewards) < 5 else []\n"
    trials = [ScoredTrial("g.0", "g", 0.0), ScoredTrial("g.1", "g", 7.0)]
    with pytest.raises(BadBatch, match=r"own.py:shorter: for rewards \[0.0, 7.0\] it returned 0 values, must be 2"):
        group_advantages(trials, estimator_named(own(tmp_path, text)))


def test_imitation_reads_none(tmp_path: Path) -> None:
    given = own(tmp_path, SHORTER)
    with pytest.raises(ConfigError, match=r"estimator: got .*own\.py:shorter, needs an objective that reads rewards"):
        settings(estimator=given, objective="sft").check()
