"""What of verl's configuration is refused before anything runs, and what of a request. No verl is needed."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, ConfigError
from steno_adapters.verl.checks import check_config, check_request, check_session, context_tokens, forced_law


class Node(dict[str, Any]):
    """As OmegaConf's nodes are read."""

    __getattr__ = dict.__getitem__


def config(**rollout: Any) -> Node:
    plain = Node(
        calculate_log_probs=True, logprobs_mode="processed_logprobs", top_p=1.0, top_k=-1, temperature=0.7,
        prompt_length=100, response_length=20, max_model_len=None,
    )  # fmt: skip
    actor = Node(loss_agg_mode=rollout.pop("loss_agg_mode", "token-mean"))
    actor["policy_loss"] = Node(loss_mode=rollout.pop("loss_mode", "vanilla"))
    rest = Node(use_v1=rollout.pop("use_v1", True)), Node(adv_estimator=rollout.pop("adv_estimator", "grpo"))
    rest[1]["filter_groups"] = rollout.pop("filter_groups", None)
    reward = Node(
        reward_model=Node(enable=rollout.pop("reward_model", False)),
        custom_reward_function=Node(path=rollout.pop("reward_function", None)),
        reward_manager=Node(name=rollout.pop("reward_manager", "naive")),
    )
    distillation = Node(enabled=rollout.pop("distillation", False))
    verls = Node(rollout=Node(plain | rollout), actor=actor)
    return Node(actor_rollout_ref=verls, trainer=rest[0], algorithm=rest[1], reward=reward, distillation=distillation)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"calculate_log_probs": False}, "rollout.calculate_log_probs: got False, must be True"),
        ({"logprobs_mode": "raw_logprobs"}, "rollout.logprobs_mode: got raw_logprobs, must be processed_logprobs"),
        ({"top_p": 0.9}, "rollout.top_p: got 0.9, must be 1.0"),
        ({"top_k": 50}, "rollout.top_k: got 50, must be -1"),
        ({"temperature": 0}, "rollout.temperature: got 0, must be above 0"),
        ({"use_v1": False}, "trainer.use_v1: got False, must be True"),
        ({"adv_estimator": "rloo"}, "algorithm.adv_estimator: got 'rloo', must be grpo or gae"),
        (
            {"loss_agg_mode": "seq-mean-token-mean"},
            "actor.loss_agg_mode: got 'seq-mean-token-mean', counts each row as a",
        ),
        ({"loss_mode": "sapo"}, "actor.policy_loss.loss_mode: got 'sapo', counts each row as a sequence"),
        ({"loss_mode": "geo_mean"}, "or set branches: main"),
        (
            {"distillation": True},
            "distillation.enabled: got True, must be False: verl asks its teacher for the last row",
        ),
        (
            {"enable_rollout_routing_replay": True},
            "rollout.enable_rollout_routing_replay: got True, must be False: which experts",
        ),
        ({"reward_model": True}, "reward.reward_model.enable: got True, must be False: a row has its trial's reward"),
        (
            {"reward_function": "r.py"},
            "custom_reward_function.path: got r.py, must be None: a row has its trial's reward",
        ),
        ({"reward_manager": "dapo"}, "reward_manager.name: got dapo, must be naive: a row has its trial's reward: set"),
        (
            {"filter_groups": {"enable": True, "metric": "acc"}},
            "filter_groups.metric: got acc, must be reward or steno_turns or steno_rows: rows do not differ in others",
        ),
    ],
)
def test_what_would_spoil_the_rows_is_refused_before_anything_runs(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(config(**given), "all")
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("job", "law", "words"),
    [
        (
            {"response_format": ResponseFormat(type="json_object")},
            {},
            "response_format: verl's servers take no grammar",
        ),
        ({"top_logprobs": 2}, {}, "top_logprobs: got 2, must be 0"),
        ({}, {"logit_bias": {7: 1.0}}, "logit_bias: verl's servers are not asked for it"),
        ({}, {"min_tokens": 3}, "min_tokens: got 3, must be 0: verl's servers are not asked for it"),
    ],
)
def test_what_verls_servers_are_not_asked_for_is_refused(job: dict[str, Any], law: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_request(Job(**job), Sampling(**law))
    assert words in refused.value.message and refused.value.field == words.partition(":")[0]
    check_request(Job(), Sampling(min_p=0.1, seed=7))


def test_a_trainer_that_takes_one_row_of_a_session_is_refused() -> None:
    check_session({"uid", "session_id", "raw_prompt"})
    with pytest.raises(ConfigError, match=r"no session_id; it must be main_ppo .* fully_async_policy"):
        check_session({"uid", "raw_prompt"})
    with pytest.raises(ConfigError, match="no uid and no session_id"):
        check_session({"raw_prompt"})


def test_what_counts_rows_takes_the_main_branch() -> None:
    check_config(config(), "all")
    for alone in (
        {"adv_estimator": "rloo"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"loss_mode": "sapo"},
        {"distillation": True},
    ):
        check_config(config(**alone), "main")


@pytest.mark.parametrize(
    "groups",
    [
        {"enable": False, "metric": "acc"},
        {"enable": True, "metric": "reward"},
        {"enable": True, "metric": "steno_turns"},
        {"enable": True, "metric": "steno_rows"},
    ],
)
def test_verl_filters_groups_by_what_rows_have(groups: dict[str, Any]) -> None:
    check_config(config(filter_groups=groups), "all")


@pytest.mark.parametrize(
    ("branches", "metric"), [("all", "steno_failed"), ("main", "steno_failed"), ("main", "steno_rows")]
)
def test_a_filter_by_what_is_equal_in_all_rows_is_refused(branches: str, metric: str) -> None:
    """verl drops groups whose rows are equal, and plays others in their place: for ever."""
    with pytest.raises(ConfigError, match=f"filter_groups.metric: got {metric}, must be reward or steno_turns"):
        check_config(config(filter_groups={"enable": True, "metric": metric}), branches)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_what_weighs_tokens_alike_takes_all_branches(mode: str) -> None:
    """A sum over a row's tokens, divided by a number of rows that the configuration says, weighs each token the same."""
    check_config(config(loss_agg_mode=mode), "all")


def test_verls_sampling_is_forced_and_greedy_only_in_validation() -> None:
    given = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert forced_law(given, validate=False) == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert forced_law(given | {"temperature": 0}, validate=True)["temperature"] == 0
    with pytest.raises(ConfigError, match=r"got 0.0 of verl for a session to be trained"):
        forced_law(given | {"temperature": 0}, validate=False)


def test_the_context_is_verls_own_or_both_lengths_together() -> None:
    assert context_tokens(config().actor_rollout_ref.rollout) == 120
    assert context_tokens(config(max_model_len=4096).actor_rollout_ref.rollout) == 4096
