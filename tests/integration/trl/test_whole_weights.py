"""What `PromptRollouts` pushes of models that are wrapped, and of such with an adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming
from trl.experimental.async_grpo import AsyncGRPOConfig

from steno.contracts.errors import BadRequest
from steno.contracts.policy import Update, UpdateSpec
from steno.models import TINY
from steno_adapters import probe_of
from steno_adapters import weights as weights_module
from steno_adapters.trl import AsyncRollouts, async_rollouts
from steno_adapters.trl.private_names import checkpoint_parameters
from steno_adapters.trl.whole_weights import check_adapter, whole_weights
from tests.integration.engines.test_updates import Worker, mixture
from tests.support.weights.trained import perturbed

pytestmark = pytest.mark.trl
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
ADAPTERS: dict[str, dict[str, Any]] = {
    "no adapter": {},
    "an adapter": {"target_modules": ["q_proj"]},
    "an adapter, and the router whole": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 8, "num_key_value_heads": 1, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip
"""The second has buffers in its checkpoint."""


def trainer(model: Any, **changes: Any) -> Any:
    accelerator = SimpleNamespace(
        is_main_process=changes.pop("main", True), unwrap_model=lambda model: model,
        get_state_dict=lambda model: model.state_dict(), state=SimpleNamespace(deepspeed_plugin=None),
    )  # fmt: skip
    found = {"model": model, "model_wrapped": model, "is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    return SimpleNamespace(accelerator=accelerator, **found | changes)


def mixture_of(family: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and what its checkpoint has."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_experts_per_tok=1, tie_word_embeddings=False, **MIXTURES[family],
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config)
    for name, tensor in made.state_dict().items():
        if "correction_bias" in name:
            tensor.copy_(torch.rand_like(tensor))
    made.save_pretrained(folder)
    model, tensors = AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")
    assert tensors.keys() != model.state_dict().keys()
    return model, tensors


def adapted(model: Any, adapter: str) -> Any:
    return get_peft_model(model, LoraConfig(r=2, **ADAPTERS[adapter])) if ADAPTERS[adapter] else model


def check_same(weights: Any, tensors: dict[str, torch.Tensor]) -> None:
    pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
    assert len(pairs) == len(dict(pairs)), "each once"
    assert dict(pairs).keys() == tensors.keys()
    for name, tensor in pairs:
        torch.testing.assert_close(tensor, tensors[name], atol=0, rtol=0)


def rollouts_of(model: Any, push: Any) -> AsyncRollouts:
    collector: Any = SimpleNamespace(push=push)
    rollouts = AsyncRollouts(collector, [{"task_id": "a"}])
    rollouts._trainer = trainer(model)
    return rollouts


class Engine:
    """As much of DeepSpeed's engine as accelerate asks under ZeRO-3, which leaves nothing in the model's own parameters."""

    def __init__(self, model: Any) -> None:
        self._whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data = torch.empty(0)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return True

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor]:
        return self._whole


@pytest.mark.parametrize("family", MIXTURES)
def test_under_zero_3_deepspeeds_engine_gathers_and_not_the_model_in_it(tmp_path: Path, family: str) -> None:
    model, tensors = mixture_of(family, tmp_path)
    # The whole list, as transformers leaves it there: also what was not needed for this checkpoint.
    model._weight_conversions = [*model._weight_conversions, WeightRenaming(r"^language_model\.model\.", "model.")]
    made = trainer(model, model_wrapped=Engine(model), is_deepspeed_enabled=True)
    made.accelerator.distributed_type = DistributedType.DEEPSPEED
    made.accelerator.deepspeed_config = {"zero_optimization": {"stage": 3}}
    made.accelerator.get_state_dict = lambda model: Accelerator.get_state_dict(made.accelerator, model)
    with whole_weights(made) as weights:
        check_same(weights, tensors)


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


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_pushed_as_its_checkpoint_has_it(tmp_path: Path, family: str, adapter: str) -> None:
    """The engines take experts one by one, and miss what is no parameter."""
    model, tensors = mixture_of(family, tmp_path)
    with whole_weights(trainer(adapted(model, adapter))) as weights:
        check_same(weights, tensors)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_what_trl_streams_of_a_mixture_is_pushed_as_its_checkpoint_has_it(
    tmp_path: Path, family: str, adapter: str
) -> None:
    """TRL leaves out what is frozen, and what is no parameter."""
    model, tensors = mixture_of(family, tmp_path)
    model.model.embed_tokens.requires_grad_(False)
    model = adapted(model, adapter)
    versions = []

    def push(weights: Any, version: str, **_: Any) -> None:
        check_same(weights, tensors)
        versions.append(version)

    rollouts = rollouts_of(model, push)
    rollouts.send_weights((name, parameter.detach()) for name, parameter in checkpoint_parameters(model))
    assert versions == [f"{rollouts.versions.lineage}/0"]


async def test_the_embedded_engine_serves_a_mixture_that_trl_streams(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    model = perturbed(folder, 1)
    specs: list[UpdateSpec] = []

    def posted(spec: UpdateSpec) -> Update:
        specs.append(spec)
        return Update(
            update_id=spec.update_id, version=spec.version, transport=spec.transport, created_at=0.0, state="done",
            workers=[], wants=[],
        )  # fmt: skip

    def push(weights: Any, version: str, **_: Any) -> None:
        client: Any = SimpleNamespace(post_update=posted)
        weights_module.push(client, weights, version, folder=tmp_path, probe=probe_of(model, range(24)))

    parameters = ((name, parameter.detach()) for name, parameter in checkpoint_parameters(model))
    rollouts_of(model, push).send_weights(parameters)
    worker = Worker(tmp_path / "staging", folder)
    await worker.engine.start()
    last = await worker.update(specs[0])
    assert last.state == "served", last.message
    await worker.updates.close()
    await worker.engine.stop()


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_an_adapter_on_quantised_weights_is_refused_before_the_first_push(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Workers would refuse packed weights by their shapes."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LORA)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=dtype), requires_grad=False)
    if dtype == torch.bfloat16:
        layer.weight.quant_state = "nf4"  # as bitsandbytes does, of which the type is an option
    made = trainer(model)
    refused = r"peft_config: got an adapter on quantised weights \(.*q_proj.base_layer.weight\)"
    with pytest.raises(BadRequest, match=refused):
        check_adapter(made)
    monkeypatch.setattr(async_rollouts, "AsyncGRPOTrainer", lambda *_, **__: made)
    collector: Any = None
    args = AsyncGRPOConfig("out", token_budget=0, use_cpu=True, bf16=False)
    with pytest.raises(BadRequest, match=refused):
        AsyncRollouts(collector, [{"task_id": "a"}]).trainer("model", args)


def test_an_adapter_on_weights_that_are_quantised_in_buffers_is_refused() -> None:
    """GPTQ's and AWQ's, which transformers marks."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LORA)
    check_adapter(trainer(model))
    model.get_base_model().is_quantized = True
    with pytest.raises(
        BadRequest, match=r"peft_config: got an adapter on quantised weights \(by its quantization_config\)"
    ):
        check_adapter(trainer(model))
