"""TRL's `GRPOTrainer` with `PromptRollouts`: prompts name tasks, one row per trial, weights after each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno.contracts.errors import BadRequest, ConfigError
from steno.models import TINY
from steno_adapters import AgentCall, Collector
from steno_adapters.trl import PromptRollouts, check_version
from steno_adapters.trl.prompt_rollouts import _key
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

pytestmark = pytest.mark.trl

TASKS = [{"task_id": name, "prompt": f"Tell me about {name}."} for name in ("rain", "snow")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    worker = ["--engine", "transformers", "--model", str(TINY)]
    with without_settings(), running(tmp_path_factory.mktemp("stack"), worker) as found:
        yield found


def talk(call: AgentCall) -> float:
    """The second trial of a group fails, the third one has a second conversation, which is shorter."""
    number = int(call.trial_id.rsplit(".", 1)[1])
    if number == 1:
        raise RuntimeError("this agent always breaks")
    with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=5) as client:
        for text, tokens in [(call.task["prompt"], 12), ("Anything else?", 2)][: 2 if number == 2 else 1]:
            asked: list[Any] = [{"role": "user", "content": text}]
            client.chat.completions.create(model="tiny", messages=asked, max_tokens=tokens)
    return float(number)


def test_prompts_of_two_tasks_must_differ() -> None:
    collector: Any = None
    with pytest.raises(BadRequest, match="'b' and 'c' have the same prompt"):
        PromptRollouts(
            collector, [{"task_id": name, "prompt": name} for name in "ab"] + [{"task_id": "c", "prompt": "b"}]
        )
    with pytest.raises(BadRequest, match="'a' has no field 'prompt'"):
        PromptRollouts(collector, [{"task_id": "a"}])


def test_a_task_is_found_by_messages_that_have_been_in_a_dataset() -> None:
    """There, each message has the keys of all."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    other = {"type": "function", "function": {"name": "wait", "arguments": {"for": 3}}}
    prompts = [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello.", "name": "Ann"}],
        [{"role": "assistant", "content": None, "tool_calls": [call, other]}, {"role": "user", "content": "And?"}],
    ]
    given = Dataset.from_dict({"prompt": prompts})["prompt"][:]
    assert given != prompts
    collector: Any = None
    rollouts = PromptRollouts(collector, [{"task_id": str(n), "prompt": prompt} for n, prompt in enumerate(prompts)])
    assert [rollouts._tasks[_key(prompt)]["task_id"] for prompt in given] == ["0", "1"]


@pytest.mark.parametrize("found", ["1.15.0", "1.17.0", None])
def test_another_release_of_trl_is_refused(found: str | None) -> None:
    with pytest.raises(ConfigError, match=r"1\.16\.0"):
        check_version(found)


def test_a_step_of_grpo_takes_one_row_per_trial_and_pushes_what_it_made(stack: Stack, tmp_path: Path) -> None:
    from trl import GRPOConfig

    torch.set_num_threads(1)
    args = GRPOConfig(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=64,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", learning_rate=1e-3,
        logging_steps=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Collector(stack.url, "prompts", agent=talk) as collector:
        rollouts = PromptRollouts(collector, TASKS)
        with pytest.warns(UserWarning, match="does not use the recorded ones"):
            trainer = rollouts.trainer(model, args, processing_class=AutoTokenizer.from_pretrained(TINY))
        trainer.train()
        assert (rollouts.counts["trials"], rollouts.counts["empty_trials"]) == (16, 4)
        assert rollouts.counts["other_branches"] == 4 and rollouts.counts["other_branch_tokens"] <= 8
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
        assert rewards == pytest.approx([(0 + 2 + 3) / 3] * 2), "a failed trial has no reward, and is no zero"
        view = collector.client.run("prompts")
        assert (view.groups.acknowledged, view.groups.ready, view.groups.leased) == (4, 0, 0)
        assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        [policy] = [view for view in collector.client.policies() if view.policy == "default"]
        assert policy.version is not None and policy.version.endswith("/2")
        versions = {
            span.version for session in collector.client.sessions(run_id="prompts")
            for turn in collector.client.turns(session.trial_id) for span in turn.versions
        }  # fmt: skip
        assert {version.rpartition("/")[2] for version in versions} == {"0", "1"}, (
            "each step samples what the last one made"
        )

        with pytest.raises(BadRequest, match="no task has 'What'"):
            rollouts(["What"], trainer)


def test_an_adapter_is_pushed_merged(stack: Stack, tmp_path: Path) -> None:
    from peft import LoraConfig
    from trl import GRPOConfig

    torch.set_num_threads(1)
    args = GRPOConfig(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=8, num_generations=4, max_completion_length=64,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with Collector(stack.url, "adapter", agent=talk) as collector:
        lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
        with pytest.warns(UserWarning, match="does not use the recorded ones"):
            trainer = PromptRollouts(collector, TASKS, push_timeout_s=60).trainer(
                model, args, processing_class=AutoTokenizer.from_pretrained(TINY), **lora
            )
        trainer.train()
        [policy] = [view for view in collector.client.policies() if view.policy == "default"]
        assert policy.version is not None and policy.version.endswith("/1")
        assert any("lora_B" in name and tensor.any() for name, tensor in model.state_dict().items())


def test_another_temperature_than_that_of_the_record_is_refused(stack: Stack) -> None:
    class Cold:
        temperature, eos_token_ids = 0.5, [0]

    with Collector(stack.url, "cold", agent=talk, temperature=1.0) as collector:
        trainer: Any = Cold()
        with pytest.raises(BadRequest, match=r"sampled at \[1.0\], the trainer divides by 0.5"):
            PromptRollouts(collector, TASKS)([TASKS[0]["prompt"]], trainer)
