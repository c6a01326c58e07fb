"""How many parameters a model has, and how many of them a token meets: of a mixture of experts, the chosen ones only.

Counted on the model itself, which may be partitioned, or a skeleton without memory that is made from the configuration alone: so
no family's formula is written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from steno.contracts.errors import ConfigError

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names in models' configurations for how many experts a token is sent to."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""And for how many there are."""


@dataclass(frozen=True)
class ModelSizes:
    """Elements. total: all, tied ones once. active: those that one token meets. outer: of embedding and head, part of both."""

    total: int
    active: int
    outer: int


def sizes_of(lm: Any) -> ModelSizes:
    """Args: lm: a causal language model of transformers; whole, partitioned by ZeRO-3, or on the meta device.

    Raises: ConfigError: it has experts that can't be counted; names the kind of model and the fields that were looked at.
    """
    whole_of = _experts(lm)
    outer = {id(module.weight) for module in (lm.get_input_embeddings(), lm.lm_head)}
    total = active = 0.0
    for parameter in lm.parameters():
        size = full_numel(parameter)
        total += size
        active += size * whole_of.get(id(parameter), 1.0)
    found = sum(full_numel(parameter) for parameter in lm.parameters() if id(parameter) in outer)
    return ModelSizes(int(total), round(active), found)


def skeleton(config: Mapping[str, Any]) -> Any:
    """A model of this config.json that takes no memory.

    Raises: ConfigError: transformers knows no causal language model of this kind, or can't build it.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(config)
    kind = given.pop("model_type", None)
    try:
        text = AutoConfig.for_model(kind, **given).get_text_config()
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(text)
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(
            f"model_type {kind}: can't build a model from its config.json: {error}", field="model"
        ) from error


def full_numel(parameter: Any) -> int:
    """Elements of a parameter, partitioned or not: `numel()` of a partitioned one is 0."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _experts(lm: Any) -> dict[int, float]:
    """Of experts' parameters, by id, which part of them a token meets."""
    config = lm.config
    chosen = next((value for name in CHOSEN if (value := getattr(config, name, None))), None)
    found: dict[int, float] = {}
    for path, module in lm.named_modules():
        kind = type(module).__name__
        if not (path.rsplit(".", 1)[-1] == "experts" or ("Experts" in kind and "Shared" not in kind)):
            continue
        count = len(module) if isinstance(module, nn.ModuleList) else getattr(module, "num_experts", None)
        for parameter in module.parameters():
            if id(parameter) in found:
                continue  # of an expert of a list that was seen
            shape = getattr(parameter, "ds_shape", None) or parameter.shape
            there = count or (shape[0] if len(shape) == 3 else None)
            if not there or not chosen:
                raise ConfigError(
                    f"model_type {config.model_type}: the experts of {path} can't be counted: {there} there, {chosen} per token "
                    f"(read from {', '.join(CHOSEN)})",
                    field="model",
                )
            found[id(parameter)] = min(1.0, chosen / there)
    if not found and max((getattr(config, name, None) or 0 for name in EXPERTS), default=0) > 1 and _has_router(config):
        raise ConfigError(
            f"model_type {config.model_type}: its configuration has experts, and none are found in the model",
            field="model",
        )
    return found


def _has_router(config: Any) -> bool:
    """Whether a field says that a token is sent to some of the experts. Dense members of a family have counts of experts, too."""
    return any(getattr(config, name, None) for name in CHOSEN)
