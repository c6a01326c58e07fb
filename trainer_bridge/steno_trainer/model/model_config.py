"""What a model's configuration says of it before its weights are read: what is refused, and which kinds of layers it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steno.contracts.errors import ConfigError

SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap")
"""Names in models' configurations for a tanh over logits."""
NARROW = ("index_topk", "attention_chunk_size", "attention_window_size", "keep_window_size")
"""Names for attention to a part of what comes before, in tokens, that transformers keeps in its masks alone. (Sliding windows are
not among them: attention is told of those.)"""
LAYERS = frozenset(
    {"full_attention", "sliding_attention", "attention", "linear_attention", "conv", "mamba", "recurrent", "hybrid"}
    | {"mamba2", "mlp", "moe", "dense", "sparse"}
)
"""Kinds of layers, as configurations name them, that need nothing but what attention and the layers themselves are told."""
STATEFUL = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid"})


def check_config(config: Any, *, longest: int) -> None:
    """What can be told before weights are read.

    Args: config: transformers' configuration of the text model. longest: tokens of the longest sample.
    Raises: ConfigError: names the model's field, its value, and what is allowed.
    """

    def refuse(name: str, allowed: str) -> None:
        raise ConfigError(f"model: {name} is {getattr(config, name)}; allowed here: {allowed}", field="model")

    for name in SOFT_CAPS:
        if getattr(config, name, None):
            refuse(name, "none (a soft cap is not supported)")
    for name, rate in sorted(vars(config).items()):
        drops = "dropout" in name or name.endswith("_pdrop") or name == "router_jitter_noise"
        if (
            drops
            and not any(part in name for part in ("classif", "summary"))
            and isinstance(rate, int | float)
            and rate
        ):
            refuse(name, "0 (with dropout, log-probabilities are random); set it in the model's config.json")
    for name in NARROW:
        if 0 < (getattr(config, name, None) or 0) < longest:
            refuse(name, f"{longest} or more, the longest sample (lower micro_batch_tokens to it)")
    chunked = "chunked_attention"  # as good as whole where no sample reaches beyond a chunk, which was checked above
    for kind in sorted({*layer_kinds(config)} - LAYERS - {chunked}):
        raise ConfigError(
            f"model: layers of the kind {kind} are not supported; allowed: {', '.join(sorted(LAYERS))}", field="model"
        )


def positions(config: Any) -> int:
    """Tokens that a model takes: `max_position_embeddings`, or what its rotary embedding stretches the context to, if that is
    more. Gemma 3 says the stretched length itself."""
    said = int(getattr(config, "max_position_embeddings", None) or 2**31)
    found = [said]
    for rope in rope_parameters(config):
        factor = rope.get("factor") or 1
        if rope_kind(rope) == "yarn":
            found.append(int((rope.get("original_max_position_embeddings") or said) * factor))
        elif rope_kind(rope) in ("linear", "dynamic") and "gemma3" not in config.model_type:
            found.append(int(said * factor))
    return max(found)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of its rotary embedding: of the whole model, and of each kind of layers where they differ."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [given, *(one for one in given.values() if isinstance(one, dict))]


def rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def layer_kinds(config: Any) -> list[str]:
    """Of each layer, as the configuration says. Empty: it says nothing, so all are alike."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        if found := getattr(config, name, None):
            return [str(kind) for kind in found]
    return []
