"""Adapters as a trainer leaves them: peft's layers around a model, random in both matrices, as an update with its manifest and a
probe."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from steno.contracts.policy import AdapterEntry, Probe, UpdateSpec
from steno.models.checkpoint import checkpoint_digest
from tests.support.weights.trained import export, logprobs_of

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "down_proj")


def adapted(
    model_dir: Path, seed: int, *, rank: int = RANK, targets: tuple[str, ...] = TARGETS, scale: float = 0.2
) -> PreTrainedModel:
    """float32. The same for the same seed; another seed is another adapter of the same model."""
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.train(False)


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def adapter_update(
    model_dir: Path, model: PreTrainedModel, folder: Path, step: int, *, rank: int = RANK, **fields: object
) -> UpdateSpec:
    """A `filesystem` update to this adapter, with a probe of 1e-3."""
    ids = [5, 9, 40, 41, 300, 7, 12, 77]
    entry = AdapterEntry(base=checkpoint_digest(model_dir), rank=rank, alpha=ALPHA)
    given: dict[str, object] = {
        "lineage": "run",
        "step": step,
        "transport": "filesystem",
        "location": str(folder),
        "manifest": export(adapter_tensors(model), folder).model_copy(update={"adapter": entry}),
        "probe": Probe(token_ids=ids, logprobs=logprobs_of(model, ids), tolerance=1e-3),
    }
    return UpdateSpec.model_validate(given | fields)
