"""TRL's tree attention on a CPU, in the place of its kernel for GPUs: a segment's tokens attend to their path from the root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """query, key, value: [1, heads, tokens, size]. Returns: [1, tokens, heads, size]."""
    starts, paths = given["tree_cu_seqlens_q"].tolist(), given["tree_cu_seqlens_k"].tolist()
    index = given["tree_kv_index"]
    repeat = query.shape[1] // key.shape[1]
    out = []
    for i in range(len(starts) - 1):
        at, path = slice(starts[i], starts[i + 1]), index[paths[i] : paths[i + 1]]
        k, v = (x[:, :, path].repeat_interleave(repeat, 1) for x in (key, value))
        bias = causal_lower_right(starts[i + 1] - starts[i], len(path))
        out.append(
            torch.nn.functional.scaled_dot_product_attention(query[:, :, at], k, v, bias, scale=given.get("scaling"))
        )
    return torch.cat(out, 2).transpose(1, 2), None


def prepare() -> None:
    """Before a trainer is made: it asks for the GPU's name, to tell how much of its speed is used."""
    torch.cuda.get_device_name = lambda device=None: "CPU"  # type: ignore[assignment]


def register() -> None:
    """After a trainer was made: making one registers the kernel."""
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
