"""What `PromptRollouts` pushes of models that are wrapped, and of such with an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from steno.contracts.errors import BadRequest
from steno.models import TINY
from steno_adapters.trl.whole_weights import check_adapter, whole_weights

pytestmark = pytest.mark.trl
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def trainer(model: Any, **changes: Any) -> Any:
    accelerator = SimpleNamespace(
        is_main_process=changes.pop("main", True), unwrap_model=lambda model: model,
        get_state_dict=lambda model: model.state_dict(), state=SimpleNamespace(deepspeed_plugin=None),
    )  # fmt: skip
    found = {"model": model, "model_wrapped": model, "is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    return SimpleNamespace(accelerator=accelerator, **found | changes)


class Engine:
    """As much of DeepSpeed's engine as accelerate asks under ZeRO-3."""

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return True

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.ones(1)}


def test_under_zero_3_deepspeeds_engine_gathers_and_not_the_model_in_it() -> None:
    model = torch.nn.Linear(1, 1)
    made = trainer(model, model_wrapped=Engine(), is_deepspeed_enabled=True)
    made.accelerator.distributed_type = DistributedType.DEEPSPEED
    made.accelerator.deepspeed_config = {"zero_optimization": {"stage": 3}}
    made.accelerator.get_state_dict = lambda model: Accelerator.get_state_dict(made.accelerator, model)
    with whole_weights(made) as weights:
        assert weights == {"weight": torch.ones(1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_under_the_checkpoints_names_and_taken_out_again_to_the_bit(dtype: torch.dtype) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype)
    names = {name for name, _ in plain.named_parameters()}
    model = get_peft_model(plain, LORA)
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with whole_weights(trainer(model)) as weights:
        sent = {name: tensor.clone() for name, tensor in weights}  # type: ignore[misc]
    assert sent.keys() == names == merged.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], atol=0, rtol=0)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before.keys() == after.keys()
    with whole_weights(trainer(model, main=False)) as weights:
        assert not weights, "of another rank"


@pytest.mark.parametrize("adapted", [False, True])
def test_experts_are_pushed_one_by_one_as_checkpoints_have_them(tmp_path: Path, adapted: bool) -> None:
    """The engines take them under these names alone."""
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert names != model.state_dict().keys()
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with whole_weights(trainer(model)) as weights:
        assert {name for name, _ in weights} == names  # type: ignore[misc]


def test_a_push_that_fails_leaves_the_model_as_it_was() -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16), LORA)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="no disk"), whole_weights(trainer(model)):
        raise RuntimeError("no disk")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_adapter_that_cannot_be_merged_is_refused_by_name() -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LORA)
    check_adapter(trainer(model))
    zero = trainer(model, is_deepspeed_enabled=True)
    for stage, refused in ((2, False), (3, True)):
        zero.accelerator.state.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
        if not refused:
            check_adapter(zero)
            continue
        with pytest.raises(BadRequest, match="peft_config: got an adapter under DeepSpeed ZeRO-3, must be"):
            check_adapter(zero)
    with pytest.raises(BadRequest, match="peft_config: got an adapter under FSDP, must be"):
        check_adapter(trainer(model, is_fsdp_enabled=True))
    tuned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompts = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), tuned)
    with pytest.raises(BadRequest, match="peft_config: got PROMPT_TUNING, must be an adapter that can be merged"):
        check_adapter(trainer(prompts))
