"""What of verl's configuration would spoil what is recorded or trained: said before anything runs; and what of a request verl's
servers are not asked for. No verl is imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, ConfigError

SEVERAL_ROWS = ("grpo", "gae")
"""Estimators that give each session one advantage however many rows it has, or each row its own. The others would count a session
once for each of its rows."""
MEANS_OF_ROWS = {"loss_agg_mode": ("seq-mean-token-mean",), "policy_loss.loss_mode": ("sapo", "geo_mean")}
"""Settings of the actor whose losses add up a mean over each row's tokens, so that a trial with two rows weighs twice. The
sums of `seq-mean-token-sum` are divided by a number of rows that the configuration says, and weigh each token the same."""
FILTERS = ("reward", "steno_turns")
"""Metrics that verl can filter groups by. `steno_failed` is none of them: it is 0 in each trained row, so verl would accept no
group, and sample for ever."""
ROLLOUT = "actor_rollout_ref.rollout"


def check_config(config: Any, branches: str) -> None:
    """Args: config: verl's, whole; branches: of `VerlSettings`.

    Raises: ConfigError: names the key, the value, and what it must be.
    """
    rollout = config.actor_rollout_ref.rollout
    _must(
        config.trainer.get("use_v1", False),
        True,
        "trainer.use_v1",
        "only the V1 trainers take several rows of a session",
    )
    _must(
        rollout.calculate_log_probs,
        True,
        f"{ROLLOUT}.calculate_log_probs",
        "each recorded token has its log-probability",
    )
    _must(rollout.get("logprobs_mode", "processed_logprobs"), "processed_logprobs", f"{ROLLOUT}.logprobs_mode",
          "log-probabilities must be those that tokens were sampled at")  # fmt: skip
    _must(float(rollout.top_p), 1.0, f"{ROLLOUT}.top_p", TRUNCATED)
    if int(rollout.top_k) > 0:
        raise ConfigError(f"{ROLLOUT}.top_k: got {rollout.top_k}, must be -1: {TRUNCATED}", field=f"{ROLLOUT}.top_k")
    if not float(rollout.temperature) > 0:
        raise ConfigError(
            f"{ROLLOUT}.temperature: got {rollout.temperature}, must be above 0: what is trained is sampled",
            field=f"{ROLLOUT}.temperature",
        )
    _must(rollout.get("enable_rollout_routing_replay", False), False, f"{ROLLOUT}.enable_rollout_routing_replay",
          "which experts verl's servers chose is not recorded; instead of router_replay.mode R3 set R2 or disabled")  # fmt: skip
    _check_rewards(config, branches)
    estimator = str(config.algorithm.adv_estimator)
    if branches == "all" and estimator not in SEVERAL_ROWS:
        raise ConfigError(
            f"algorithm.adv_estimator: got {estimator!r}, must be {' or '.join(SEVERAL_ROWS)}, since a trial that forked has "
            "several rows; or set branches: main",
            field="algorithm.adv_estimator",
        )
    if branches == "all":
        _must(
            config.distillation.enabled,
            False,
            "distillation.enabled",
            "verl asks its teacher for the last row of a session, and a trial that forked has several; or set branches: main",
        )
        _check_weights(config.actor_rollout_ref.actor)


def _check_rewards(config: Any, branches: str) -> None:
    """Raises: ConfigError: verl would score rows itself, or is told to and would not."""
    reward = config.reward
    own = "a row has its trial's reward: set `reward`, of the agents' settings, instead"
    _must(reward.reward_model.enable, False, "reward.reward_model.enable", own)
    _must(reward.custom_reward_function.path, None, "reward.custom_reward_function.path", own)
    _must(reward.reward_manager.name, "naive", "reward.reward_manager.name", own)
    groups = config.algorithm.get("filter_groups") or {}
    metrics = (*FILTERS, "steno_rows") if branches == "all" else FILTERS
    if groups.get("enable", False) and groups.get("metric") not in metrics:
        raise ConfigError(
            f"algorithm.filter_groups.metric: got {groups.get('metric')}, must be {' or '.join(metrics)}: rows do not differ in "
            "others",
            field="algorithm.filter_groups.metric",
        )


def _check_weights(actor: Any) -> None:
    for key, refused in MEANS_OF_ROWS.items():
        got: Any = actor
        for name in key.split("."):
            got = got[name]
        if str(got) in refused:
            raise ConfigError(
                f"actor_rollout_ref.actor.{key}: got {str(got)!r}, counts each row as a sequence, and a trial that forked has "
                "several rows: set actor_rollout_ref.actor.loss_agg_mode=token-mean with another loss_mode than "
                f"{' and '.join(MEANS_OF_ROWS['policy_loss.loss_mode'])}, or set branches: main",
                field=f"actor_rollout_ref.actor.{key}",
            )


TRUNCATED = "a token drawn from a truncated distribution is not trained"


def _must(got: Any, needed: Any, key: str, why: str) -> None:
    if got != needed:
        raise ConfigError(f"{key}: got {got}, must be {needed}: {why}", field=key)


def forced_law(sampling: Mapping[str, Any], *, validate: bool) -> dict[str, Any]:
    """verl's sampling parameters of a session, as fields of the sampling law that override the agent's.

    Raises: ConfigError: a session for training is to be sampled greedily (verl's `remax`).
    """
    temperature, top_k = float(sampling["temperature"]), int(sampling["top_k"])
    if not validate and not temperature > 0:
        raise ConfigError(
            f"temperature: got {temperature} of verl for a session to be trained, must be above 0 (algorithm.adv_estimator: "
            "remax can't be used)",
            field="temperature",
        )
    return {
        "temperature": temperature,
        "top_p": float(sampling["top_p"]),
        "top_k": max(0, top_k),
        "repetition_penalty": float(sampling.get("repetition_penalty", 1.0)),
    }


def check_session(fields: Collection[str]) -> None:
    """Args: fields: what verl gives a session. Raises: ConfigError: this trainer of verl's takes one row of a session."""
    missing = [name for name in ("uid", "session_id") if name not in fields]
    if missing:
        raise ConfigError(
            f"trainer: this verl trainer gives a session no {' and no '.join(missing)}; it must be main_ppo with trainer.use_v1 "
            "(trainer.v1.trainer_mode sync, colocate_async or separate_async): others, such as fully_async_policy and "
            "one_step_off_policy, take only one row of a session",
            field="trainer.v1.trainer_mode",
        )


def check_request(job: Job, law: Sampling) -> None:
    """Raises: BadRequest: a grammar, more than one candidate per token, a logit bias, or a least number of tokens."""
    if job.response_format.type != "text":
        raise BadRequest("response_format: verl's servers take no grammar: ask for text", field="response_format")
    if job.top_logprobs:
        raise BadRequest(
            f"top_logprobs: got {job.top_logprobs}, must be 0: verl's servers give none", field="top_logprobs"
        )
    if law.logit_bias:
        raise BadRequest("logit_bias: verl's servers are not asked for it: leave it out", field="logit_bias")
    if law.min_tokens > 0:
        raise BadRequest(
            f"min_tokens: got {law.min_tokens}, must be 0: verl's servers are not asked for it", field="min_tokens"
        )


def context_tokens(rollout: Any) -> int:
    """Most tokens of a prompt and its answer."""
    return int(rollout.get("max_model_len") or 0) or int(rollout.prompt_length) + int(rollout.response_length)
