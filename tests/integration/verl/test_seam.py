"""What `steno_adapters.verl.seam` takes of verl and TransferQueue is as it is used: an upgrade that changes it fails here.

No Ray is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn, get_dataset_class
from verl.workers.config import RolloutConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from steno.contracts.errors import ConfigError
from steno.models import TINY
from steno_adapters.verl import check_versions, seam
from steno_adapters.verl.checks import check_config, context_tokens
from steno_adapters.verl.loop import RemoteAgentLoop, task_name
from steno_adapters.verl.manager import StenoAgentLoopManager, settings_of
from steno_adapters.verl.session_rows import training_rows
from steno_rollouts.build import Prepared
from tests.integration.verl.verl_job import loop_file, task_folders, verl_config
from tests.support.sources import ROOT
from tests.unit.adapters.test_verl_parts import sample

pytestmark = pytest.mark.verl
EXAMPLE = ROOT / "deploy/examples/qwen2.5-3b-mini-swe-agent"


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def test_the_installed_releases_are_those_that_this_was_run_with() -> None:
    check_versions()


def test_a_servers_answer_and_a_sessions_row_have_the_fields_that_are_used() -> None:
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)
    row = {
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "reward_score",
        "num_turns",
        "metrics",
        "extra_fields",
    }
    assert row <= set(AgentLoopOutput.model_fields)
    assert {"request_id", "prompt_ids", "sampling_params"} <= parameters(LLMServerClient.generate)


def test_verl_makes_an_agent_loop_and_runs_it_as_ours_is_written() -> None:
    assert {"trainer_config", "server_manager", "tokenizer"} <= parameters(AgentLoopBase.__init__)
    assert list(inspect.signature(AgentLoopBase.run).parameters) == ["self", "sampling_params", "kwargs"]
    assert parameters(AgentLoopBase.run) == parameters(RemoteAgentLoop.run)
    assert AgentLoopBase.__abstractmethods__ == {"run"}
    worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert {"output", "validate"} <= parameters(worker._agent_loop_postprocess)
    resumes = FullyAsyncLLMServerClient.generate
    assert issubclass(FullyAsyncLLMServerClient, LLMServerClient) and resumes is not LLMServerClient.generate


def test_transfer_queue_lists_tags_by_partition() -> None:
    assert "partition_id" in parameters(transfer_queue.async_kv_list)
    assert seam.AgentLoopManagerTQ is agent_loop_tq.AgentLoopManagerTQ


def test_verls_gae_takes_the_reward_of_a_row_that_was_cut_inside_a_tool_result() -> None:
    [row] = training_rows([sample("ppsspppss")], lineage="verl-a", prompt_length=2, response_length=4).rows
    output = AgentLoopOutput(
        prompt_ids=row.prompt_ids, response_ids=row.response_ids, response_mask=row.mask, reward_score=3.0,
        metrics=AgentLoopMetrics(),
    ).as_dict()  # fmt: skip
    rewards, mask = output["rm_scores"][None], output["response_mask"][None].float()
    one = torch.tensor(1.0)
    _, returns = compute_gae_advantage_return(rewards, torch.zeros_like(rewards), mask, gamma=one, lam=one)
    assert returns[mask.bool()].tolist() == [3.0, 3.0]


def test_verls_own_configuration_has_what_is_looked_at(tmp_path: Path) -> None:
    config = verl_config(None)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert isinstance(rollout, RolloutConfig)
    names = {field.name for field in dataclasses.fields(RolloutConfig)}
    assert {
        "calculate_log_probs",
        "logprobs_mode",
        "temperature",
        "top_p",
        "top_k",
        "prompt_length",
        "response_length",
    } <= names
    assert {"max_model_len", "full_determinism", "agent", "name", "enable_rollout_routing_replay"} <= names
    assert {"path", "hf_config_path", "use_shm", "trust_remote_code"} <= set(config.actor_rollout_ref.model)
    assert "use_shm" in parameters(seam.copy_to_local) and "apply_chat_template_kwargs" in config.data
    assert config.trainer.use_v1 is True and isinstance(omega_conf_to_dataclass(config.algorithm), AlgoConfig)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs: got False, must be True"),
        ("trainer.use_v1=false", "trainer.use_v1: got False, must be True"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable: got True, must be False"),
        ("reward.custom_reward_function.path=r.py", "reward.custom_reward_function.path: got r.py, must be None"),
        ("reward.reward_manager.name=dapo", "reward.reward_manager.name: got dapo, must be naive"),
        ("algorithm.filter_groups={enable:true,metric:acc}", "algorithm.filter_groups.metric: got acc, must be reward"),
        ("distillation.enabled=true", "distillation.enabled: got True, must be False"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
            "enable_rollout_routing_replay: got True, must be False",
        ),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator: got 'remax', must be grpo or gae"),
        ("+steno.group_size=4", "group_size: can't be given here: actor_rollout_ref.rollout.n decides it"),
        ("+steno.nonsense=4", "+steno.nonsense: no such setting"),
    ],
)
def test_the_manager_refuses_a_configuration_before_anything_is_started(
    override: str, words: str, tmp_path: Path
) -> None:
    tasks = task_folders(tmp_path / "tasks", {"plain": "Write a note."})
    config = verl_config(loop_file(tmp_path, tasks), override)
    with pytest.raises(ConfigError) as refused:
        StenoAgentLoopManager(config, llm_client=None)
    assert words in str(refused.value)


def test_verl_says_how_many_rows_of_a_batch_are_padding() -> None:
    """docs/verl.md has the line."""
    padding = seam.padding_utils
    seam.let_padding_be_logged()
    assert padding.logger.isEnabledFor(logging.INFO)
    source = inspect.getsource(padding.upsample_batch_to_divisible_size)
    assert "Upsampled batch from %d to %d with %d synthetic padding samples" in source


@pytest.mark.parametrize(
    ("override", "branches", "taken"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "all", False),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "main", True),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "all", False),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "all", True),
    ],
)
def test_verls_own_names_of_what_counts_rows_are_those_that_are_refused(
    override: str, branches: str, taken: bool
) -> None:
    overrides = (EXAMPLE / "verl-overrides.txt").read_text().splitlines()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*overrides, override])
    with contextlib.nullcontext() if taken else pytest.raises(ConfigError, match="counts each row as a sequence"):
        check_config(config, branches)


def test_the_examples_configuration_is_taken_by_verl_and_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as verl looks at it without a GPU and without the model."""
    monkeypatch.chdir(EXAMPLE)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", (EXAMPLE / "verl-overrides.txt").read_text().splitlines())
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).ppo_mini_batch_size == 4
    settings = settings_of(config)
    check_config(config, settings.branches)
    assert settings.proxy == ""
    tasks = len(Prepared.of(settings, "run").tasks)
    assert tasks >= config.data.train_batch_size > 1, (
        "verl drops what does not fill a batch, and divides by batches per epoch"
    )
    assert context_tokens(config.actor_rollout_ref.rollout) == 32768


def test_a_loop_that_is_not_registered_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "loop.yaml"
    empty.write_text("- name: other\n  _target_: other.Loop\n")
    with pytest.raises(
        ConfigError, match=r"must be a file with an entry whose _target_ is steno_adapters.verl.loop.RemoteAgentLoop"
    ):
        StenoAgentLoopManager(verl_config(empty), llm_client=None)


def test_verls_own_data_set_reads_what_steno_tasks_parquet_writes(tmp_path: Path) -> None:
    tasks = task_folders(tmp_path / "tasks", {"b": "Do B.", "a": "Do A."})
    command = [sys.executable, "-m", "steno", "tasks", "parquet", str(tasks), str(tmp_path / "train.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "2 tasks in" in done.stderr, done.stderr
    config = verl_config(None, f"data.train_files={tmp_path / 'train.parquet'}").data
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    data = get_dataset_class(config)(data_files=config.train_files, tokenizer=tokenizer, config=config)
    assert [data[i]["raw_prompt"] for i in range(len(data))] == [
        [{"role": "user", "content": "Do A."}],
        [{"role": "user", "content": "Do B."}],
    ]
    assert [(data[i]["agent_name"], task_name(data[i]["extra_info"]), data[i]["index"]) for i in range(2)] == [
        ("steno", "a", 0),
        ("steno", "b", 1),
    ]
    batch = collate_fn([data[0], data[1]])
    assert [task_name(info) for info in batch["extra_info"]] == ["a", "b"]
