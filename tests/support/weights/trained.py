"""Weights as a trainer leaves them: a model's own with noise, in safetensors shards with their manifest and a probe."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from steno.contracts.policy import Manifest, Probe, ShardEntry, TensorEntry, UpdateSpec


def perturbed(model_dir: Path, seed: int, scale: float = 0.02) -> PreTrainedModel:
    """float32. The same for the same seed."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model.train(False)


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def export(tensors: dict[str, torch.Tensor], folder: Path, shards: int = 2) -> Manifest:
    """Write them into so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    names, files = list(tensors), []
    for index in range(shards):
        name = f"model-{index:05d}.safetensors"
        save_file({one: tensors[one].contiguous() for one in names[index::shards]}, folder / name)
        data = (folder / name).read_bytes()
        files.append(ShardEntry(name=name, size=len(data), digest=digest(data)))
    entries = [
        TensorEntry(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            digest=digest(tensor.contiguous().view(torch.uint8).numpy().tobytes()),
        )
        for name, tensor in tensors.items()
    ]
    return Manifest(tensors=entries, shards=files)


def checkpoint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Names and tensors as `save_pretrained` would write them: a tied head is left out."""
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def logprobs_of(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """Of ids[1:], at temperature 1."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def update_of(model: PreTrainedModel, folder: Path, step: int, **fields: object) -> UpdateSpec:
    """A `filesystem` update to this model's weights, with a probe of 1e-3."""
    ids = [5, 9, 40, 41, 300, 7, 12, 77]
    given: dict[str, object] = {
        "lineage": "run",
        "step": step,
        "transport": "filesystem",
        "location": str(folder),
        "manifest": export(checkpoint(model), folder),
        "probe": Probe(token_ids=ids, logprobs=logprobs_of(model, ids), tolerance=1e-3),
    }
    return UpdateSpec.model_validate(given | fields)
