"""Which trials of a group are not needed any more."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.spare import SpareTrials
from steno_rollouts.outcome import EndReason, TrialResult


def ended(trial: str, reward: float | None, *, awaits: bool = False) -> TrialResult:
    return TrialResult("r", "g", trial, "t", "0", "completed", "completed", reward, awaits_reward=awaits)


def test_what_runs_is_told_to_stop_once_enough_have_a_reward_or_await_it() -> None:
    spare = SpareTrials(2)
    running = [spare.begun("g", trial) for trial in "abcd"]
    other = spare.begun("h", "e")
    spare.ended(ended("a", None))
    spare.over("g", "a")
    spare.ended(ended("b", 0.0))
    spare.over("g", "b")
    assert not spare.enough("g") and spare.groups == {"g", "h"}
    spare.ended(ended("elsewhere", None, awaits=True))
    assert spare.enough("g") and spare.groups == {"h"}
    assert [one is not None and one.is_set() for one in [*running, other]] == [False, False, True, True, False]
    late = spare.begun("g", "z")
    assert late is not None and late.is_set()


def test_a_trial_that_is_told_of_again_counts_once() -> None:
    """It awaited its reward, and has it now."""
    spare = SpareTrials(2)
    spare.ended(ended("a", None, awaits=True))
    spare.ended(ended("a", 1.0))
    assert not spare.enough("g")


def test_without_spare_trials_each_runs_to_its_end() -> None:
    spare = SpareTrials(None)
    assert spare.begun("g", "a") is None
    spare.ended(ended("b", 1.0))
    assert not spare.enough("g") and spare.groups == set()


def test_a_spare_trial_has_not_failed() -> None:
    spare = TrialResult("r", "g", "g.0", "t", "0", "aborted", EndReason.SPARE)
    assert not spare.failed and not spare.failed_early and EndReason.SPARE.status == "aborted"


def test_evaluations_have_none() -> None:
    with pytest.raises(ValidationError, match="spare_trials can't be given with purpose 'eval'"):
        RolloutSettings(tasks=".", command=["agent"], purpose="eval", spare_trials=1)  # type: ignore[arg-type]
    given = RolloutSettings(tasks=".", command=["agent"], group_size=8, spare_trials=2)  # type: ignore[arg-type]
    assert given.trials_of_group == 10


def test_a_group_and_its_spare_trials_are_no_more_than_a_group_may_have() -> None:
    with pytest.raises(ValidationError, match="spare_trials: got 97, must be at most 96"):
        RolloutSettings(tasks=".", command=["agent"], group_size=4000, spare_trials=97)  # type: ignore[arg-type]
