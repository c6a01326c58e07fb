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
        rank. targets: last words of layers' names; none: all linear layers. seed: of A, which is the same on all ranks.
    Raises: ConfigError: names `lora_targets`: a word that no linear layer has; names `model`: no layer could have one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    chosen = chosen_targets(lm, targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha or rank, target_modules=chosen, lora_dropout=0.0,
        bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    # Each rank keeps its part of what it drew: all must draw the same.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, lm, adapter_name=NAME)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if lm.is_gradient_checkpointing:
        # A layer that is computed again gets its gradient only if what comes in has one, and the embedding is frozen.
        lm.enable_input_require_grads()
    lm.train()


def chosen_targets(lm: Any, targets: Sequence[str]) -> list[str]:
    """Raises: ConfigError: as `add_adapter`."""
    linear = [path for path, module in lm.named_modules() if isinstance(module, nn.Linear) and path != "lm_head"]
    there = sorted({path.rsplit(".", 1)[-1] for path in linear})
    if not there:
        raise ConfigError("model: it has no linear layer that an adapter could be added to", field="model")
    if unknown := sorted(set(targets) - set(there)):
        raise ConfigError(
            f"lora_targets: got {', '.join(unknown)}; the model's linear layers are {', '.join(there)}",
            field="lora_targets",
        )
    return sorted(set(targets)) or there


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
