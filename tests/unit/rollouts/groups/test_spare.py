"""Which trials of a group are not needed any more."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.spare import SpareTrials
from steno_rollouts.outcome import EndReason, TrialResult


def ended(trial: str, reward: float | None, *, awaits: bool = False) -> TrialResult:
    return TrialResult("r", "g", trial, "t", "0", "completed", "completed", reward, awaits_reward=awaits)


def test_the_rest_is_not_needed_once_enough_have_a_reward_or_await_it() -> None:
    spare = SpareTrials(2)
    spare.add("g", ["a", "b", "c", "d", "e"])
    spare.ended(ended("a", None))
    spare.ended(ended("b", 0.0))
    assert spare.not_needed("g") == []
    spare.ended(ended("c", None, awaits=True))
    assert sorted(spare.not_needed("g")) == ["d", "e"] and spare.groups() == ["g"]
    spare.ending("d")
    assert spare.not_needed("g") == ["e"] and spare.is_ending("d") and not spare.is_ending("e")
    for trial in ("d", "e"):
        spare.ended(ended(trial, None))
    assert spare.groups() == [] and spare.not_needed("g") == []


def test_a_trial_that_is_told_of_again_counts_once() -> None:
    """It awaited its reward, and has it now."""
    spare = SpareTrials(2)
    spare.add("g", ["a", "b", "c"])
    spare.ended(ended("a", None, awaits=True))
    spare.ended(ended("a", 1.0))
    assert spare.not_needed("g") == []


def test_without_spare_trials_each_runs_to_its_end() -> None:
    spare = SpareTrials(None)
    spare.add("g", ["a", "b"])
    spare.ended(ended("a", 1.0))
    assert spare.not_needed("g") == [] and spare.groups() == []


def test_a_spare_trial_has_not_failed() -> None:
    spare = TrialResult("r", "g", "g.0", "t", "0", "aborted", EndReason.SPARE)
    assert not spare.failed and not spare.failed_early and EndReason.SPARE.status == "aborted"


def test_evaluations_have_none() -> None:
    with pytest.raises(ValidationError, match="spare_trials can't be given with purpose 'eval'"):
        RolloutSettings(tasks=".", command=["agent"], purpose="eval", spare_trials=1)  # type: ignore[arg-type]
    given = RolloutSettings(tasks=".", command=["agent"], group_size=8, spare_trials=2)  # type: ignore[arg-type]
    assert given.trials_of_group == 10
