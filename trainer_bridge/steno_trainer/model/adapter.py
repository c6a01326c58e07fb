"""A LoRA adapter in a model whose own weights stay as they are (`peft`).

    y = W x + (alpha / rank) B A x        W: a linear layer's weight, frozen; A [rank, in] and B [out, rank]: trained

B is 0 at first, so a run starts with the model's own log-probabilities. Nothing is dropped out. Source: LoRA, arXiv:2106.09685.
The layers are peft's own: what it and other engines load is these weights (`weights/adapters.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from steno.contracts.errors import ConfigError
from steno_trainer.weights.adapters import NAME, adapted_layers


def add_adapter(lm: Any, *, rank: int, alpha: int | None, targets: Sequence[str], seed: int) -> None:
    """Freeze the model, and give its layers an adapter. Before `deepspeed.initialize`, which partitions it with the rest.

    Args: lm: whole, or partitioned by ZeRO-3 while it was loaded; its head is a `LogprobHead`, which gets none. alpha: None: the
        rank. targets: last words of layers' names; none: all linear layers that can have one. seed: of A, which is the same on
        all ranks.
    Raises: ConfigError: names `lora_targets`: a word that is not of linear layers alone, or that peft refuses for this model;
        names `model`: no layer could have one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    chosen = chosen_targets(lm, targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha or rank, target_modules=chosen, lora_dropout=0.0,
        bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    # Each rank keeps its part of what it drew: all must draw the same.
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(config, lm, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(f"lora_targets: got {', '.join(chosen)}: {error}", field="lora_targets") from error
    if config.target_parameters:  # tensors that are no layers: what is sent would be without their adapter
        raise ConfigError(
            f"lora_targets: got {', '.join(chosen)}; of these peft adapts {', '.join(sorted(config.target_parameters))}, which "
            f"are not layers; allowed: {', '.join(sorted(config.target_modules or []))}",
            field="lora_targets",
        )
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if lm.is_gradient_checkpointing:
        # A layer that is computed again gets its gradient only if what comes in has one, and the embedding is frozen.
        lm.enable_input_require_grads()
    lm.train()


def chosen_targets(lm: Any, targets: Sequence[str]) -> list[str]:
    """Raises: ConfigError: as `add_adapter`."""
    linear, others = set[str](), set[str]()
    for path, module in lm.named_modules():
        # A subclass with a forward pass of its own (Llama 4's router) is another layer, which peft would make a plain one.
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and path != "lm_head"
        (linear if plain else others).add(path.rsplit(".", 1)[-1])
    there = sorted(word for word in linear - others if _taken(lm, word))
    if not there:
        raise ConfigError("model: it has no linear layer that an adapter could be added to", field="model")
    if unknown := sorted(set(targets) - set(there)):
        raise ConfigError(
            f"lora_targets: got {', '.join(unknown)}; the model's linear layers that can have an adapter are "
            f"{', '.join(there)}",
            field="lora_targets",
        )
    return sorted(set(targets)) or there


def _taken(lm: Any, word: str) -> bool:
    """Whether peft adapts the layers of that name in a model of this kind, and nothing else in their place.

    It refuses some in models with Mamba layers. In some mixtures of experts it takes the names of a dense feed-forward for those
    of the experts, which are one tensor.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[word])
    try:
        _check_lora_target_modules_mamba(config, lm, word)
        convert_peft_config_for_transformers(config, lm, None)
    except ValueError:
        return False
    return not config.target_parameters


@contextlib.contextmanager
def without_adapter(lm: Any) -> Iterator[None]:
    """The model as it was before it was trained, to the bit: what the adapter adds is multiplied by 0.

    Its modules are called all the same, in their order, which ZeRO-3 goes by when it gathers ahead.
    """
    layers = adapted_layers(lm).values()
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)
