"""What an episode of verifiers' was worth, and how it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.verifiers.outcome import exit_of, problem_of, worth

NAN = float("nan")


def trace(
    name: str = "agent", *, trainable: bool = True, calls: int = 1, ok: bool = True, stopped: str | None = None, **rewards: Any
) -> Any:  # fmt: skip
    """rewards: (score, weight), or None: it was not computed."""
    given = {
        key: None if told is None else SimpleNamespace(score=told[0], weight=told[1], value=told[0] * told[1])
        for key, told in rewards.items()
    }
    return SimpleNamespace(
        agent=SimpleNamespace(name=name, trainable=trainable),
        rewards=given,
        metrics={"length": 3, "odd": NAN, "unset": None, "text": "x"},
        reward=sum(each.value for each in given.values() if each is not None),
        calls=[0] * calls,
        ok=ok,
        stop_condition=stopped,
        errors=[] if ok else [error("the sandbox\nis gone")],
    )


def error(message: str) -> Any:
    return SimpleNamespace(type="SandboxError", message=message)


def episode(*traces: Any, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(traces=list(traces), ok=ok, errors=list(errors))


def test_the_reward_is_the_sum_by_weight_and_each_score_is_a_metric() -> None:
    found = worth(episode(trace(right=(1.0, 2.0), short=(0.5, -1.0))), "reward")
    assert found == CommandOutcome(EndReason.COMPLETED, 1.5, {"right": 1.0, "short": 0.5, "length": 3.0})


def test_of_several_agents_the_one_that_is_trained_or_named_has_the_reward() -> None:
    both = episode(trace("solver", right=(1.0, 1.0)), trace("judge", trainable=False, right=(0.25, 1.0)), trace("user"))
    assert worth(both, "reward").reward == 1.0
    found = worth(both, "judge")
    assert (found.reward, found.metrics["solver/right"], found.metrics["judge/right"]) == (0.25, 1.0, 0.25)
    assert worth(both, "user").reason is EndReason.NO_REWARD


def test_an_agent_that_ran_several_times_has_the_mean_of_its_runs() -> None:
    runs = [trace(right=(score, 1.0)) for score in (0.0, 1.0, 1.0, 1.0)]
    found = worth(episode(*runs, trace(ok=False, right=(0.0, 1.0))), "reward")
    assert (found.reward, found.metrics["right"]) == (0.75, 0.75), "one that failed is none of them"


@pytest.mark.parametrize("second", [0.0, 1.0], ids=["differ", "agree"])
def test_two_agents_with_rewards_are_an_error_whatever_these_are(second: float) -> None:
    with pytest.raises(RewardError, match="got 'reward', and a, b have rewards"):
        worth(episode(trace("a", r=(1.0, 1.0)), trace("b", r=(second, 1.0))), "reward")


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"right": None, "short": (1.0, 1.0)}, "reward 'right' was not computed: scoring_timeout"),
        ({"r": (NAN, 1.0)}, "got nan, must be within"),
        ({"r": (1e9, 1.0)}, "got 1e\\+09, must be within"),
    ],
)
def test_what_is_no_reward_of_a_trial_is_an_error(rewards: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        worth(episode(trace(stopped="scoring_timeout", **rewards)), "reward")


def test_an_environment_without_rewards_gives_none() -> None:
    found = worth(episode(trace()), "reward")
    assert (found.reason, found.reward) == (EndReason.NO_REWARD, None)


def test_of_two_agents_with_rewards_one_that_failed_makes_no_difference() -> None:
    with pytest.raises(RewardError, match="a, b have rewards"):
        worth(episode(trace("a", r=(1.0, 1.0)), trace("b", ok=False, r=(0.0, 1.0))), "reward")
    found = worth(episode(trace("a", r=(1.0, 1.0)), trace("b", ok=False)), "reward")
    assert (found.reward, found.metrics["a/r"]) == (1.0, 1.0)
    assert worth(episode(trace(ok=False, r=(1.0, 1.0))), "reward").reason is EndReason.NO_REWARD


def test_an_episode_without_a_call_did_not_start_whatever_verifiers_says() -> None:
    assert exit_of([trace()], True, "") == Exit(0)
    assert exit_of([trace(calls=0)], True, "stopped: setup_timeout") == Exit(None, error="stopped: setup_timeout")
    assert exit_of([], False, "x") == Exit(None, error="x")
    assert exit_of([trace(calls=20)], False, "x") == Exit(1, error="x")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (episode(trace(ok=False), ok=False), "SandboxError: the sandbox is gone"),
        (
            episode(ok=False, errors=(error("run() exceeded its deadline"),)),
            "SandboxError: run() exceeded its deadline",
        ),
        (episode(trace(stopped="setup_timeout")), "stopped: setup_timeout"),
        (episode(ok=False), "the episode failed"),
    ],
)
def test_the_first_error_says_why_an_episode_failed(ended: Any, said: str) -> None:
    assert problem_of(ended) == said
