"""How much memory a step needs, and the longest sample that fits: an estimate from shapes alone, made before anything is rented.

    python -m steno_trainer.model.memory_estimate                                    the table of docs/trainer-operations.md
    python -m steno_trainer.model.memory_estimate --config DIR/config.json --gpus 16 --offload-optimizer

Bytes of one GPU's memory, under ZeRO-3 in bfloat16 with float32 optimizer state and accumulated gradients, one micro-batch at a
time:

    weights      2 F / N     (and 2 F / N for a reference)      F parameters, N GPUs
    gradients    4 F / N     optimizer 12 F / N                 both 0 with offload_optimizer
    gathered     live parameters and buckets of the DeepSpeed configuration; the head with its gradient, 8 V H
    states       2 L H t     what activation checkpointing keeps; 0 with activation_offload; and 16 H t after the last layer
    layer        what one layer keeps when it is computed again, and its gradients
    paths        64 K t   keys and values along the paths of samples that begin alike, and their gradients
    chunk        12 C V      logits of one chunk, a few times over
    nccl                     of the first rank, with that transport: vLLM's packing buffers, and gathered buckets on their way

With `lora_rank` the F of gradients and optimizer is that of the adapter, on all linear layers but the head; frozen weights have
no gradients (a head takes 2 V H). A reference is the model itself, and `--reference` then means another model beside it, which
the setting `reference` names.

In the host, besides what is offloaded: 2 F with `push: delta`, the last push in bfloat16 over all ranks that write.

Of a mixture of experts all experts count. A model of another kind than `KINDS`, whose parameters would not be as many, is
refused.

t tokens of a micro-batch on this GPU (of a sample over sequence_parallel), L layers, H hidden size, V vocabulary, K key heads x
head size, C chunk_tokens. Paths are at most `PATHS` (8) times as long as what is computed; where nothing is shared, none are.
What one layer keeps was counted on transformers' own (tests); the rest follows from what is allocated. Kernels' workspaces, NCCL
and fragmentation are a flat reserve. An estimate: leave room, and look at `memory/peak_bytes` of the first step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno_trainer.packing.plan import PATHS

GIB = 2**30
RESERVE_BYTES = 3 * GIB
"""CUDA context, NCCL's buffers, cuBLAS workspaces."""
FRAGMENTED = 0.08
"""Of the device's memory, that the allocator can't use."""
KINDS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Models whose layers are of the shape below. Others may be, and are taken if their parameters are as many."""


@dataclass(frozen=True)
class ModelShape:
    """Of a model, as its config.json says. qk_norm: queries and keys are normalised per head (Qwen3). experts: of each layer, of
    the size `intermediate`, 0 in a dense model; chosen: how many of them a token is sent to."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a config.json of a model of the Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE kind.

        Raises: ConfigError: a model of another kind: its layers are not of this shape, which shows in how many parameters they
            have. Names the kind and its counts.
        """
        from steno_trainer.model.sizes import CHOSEN, EXPERTS, sizes_of, skeleton

        lm = skeleton(config)
        sizes = sizes_of(lm)
        known = lm.config
        experts, chosen = (next((n for x in names if (n := getattr(known, x, 0))), 0) for names in (EXPERTS, CHOSEN))
        heads = getattr(known, "num_attention_heads", 0)
        found = None
        if heads:
            found = cls(
                hidden=known.hidden_size,
                intermediate=(experts and getattr(known, "moe_intermediate_size", None)) or known.intermediate_size,
                layers=known.num_hidden_layers, heads=heads, key_heads=getattr(known, "num_key_value_heads", None) or heads,
                head_size=getattr(known, "head_dim", None) or known.hidden_size // heads, vocabulary=known.vocab_size,
                tied=bool(known.tie_word_embeddings),
                attention_bias=getattr(known, "attention_bias", False) or known.model_type == "qwen2",
                qk_norm=known.model_type.startswith("qwen3"), experts=experts, chosen=chosen if experts else 0,
            )  # fmt: skip
        if found is None or (found.parameters, found.active_parameters) != (sizes.total, sizes.active):
            raise ConfigError(
                f"model_type {known.model_type}: {sizes.total:,} parameters, {sizes.active:,} active per token; no estimate, "
                f"since its layers are not of the shape of {', '.join(KINDS)}",
                field="config",
            )
        return found

    @property
    def layer_parameters(self) -> int:
        wide, narrow = self.heads * self.head_size, self.key_heads * self.head_size
        matrices = self.hidden * (2 * wide + 2 * narrow + self.experts) + self.expert_parameters * max(1, self.experts)
        # The output projection has a bias in no model of these kinds that ships one for queries, keys and values.
        biases = (wide + 2 * narrow) * self.attention_bias
        return matrices + biases + 2 * self.hidden + 2 * self.head_size * self.qk_norm

    @property
    def expert_parameters(self) -> int:
        """Of one expert; of a dense layer's feed-forward."""
        return 3 * self.hidden * self.intermediate

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, embedding and head too."""
        return self.parameters - self.layers * (self.experts - self.chosen) * self.expert_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter on all linear layers but the head. Experts, which transformers fuses, get none."""
        wide, narrow = self.heads * self.head_size, self.key_heads * self.head_size
        ends = 4 * self.hidden + 2 * wide + 2 * narrow
        if not self.experts:
            ends += 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters + self.hidden

    @property
    def saved_per_token(self) -> int:
        """Bytes that one layer keeps of a token for its backward pass, in bfloat16: norms are computed in float32."""
        wide, narrow = self.heads * self.head_size, self.key_heads * self.head_size
        attention = (12 * wide + 10 * narrow) if self.qk_norm else (6 * wide + 4 * narrow)
        # Each chosen expert gets a copy of the token, and its answer is weighed.
        sent = (4 * self.hidden + 40) * self.chosen + 4 * self.experts
        return 16 * self.hidden + 8 * self.intermediate * max(1, self.chosen) + sent + attention + 4 * self.heads


@dataclass(frozen=True)
class Machine:
    """gpu_bytes: of one GPU. host_bytes: of all nodes together."""

    gpus: int = 8
    gpu_bytes: int = 80 * GIB
    host_bytes: int = 1200 * 10**9


@dataclass(frozen=True)
class MemoryOptions:
    """What the settings say. live: stage3_max_live_parameters; buckets: elements of reduce and prefetch buckets together, which
    are equally large. lora_rank: of the adapter that is trained; 0: the whole model is. reference: a second model is loaded, of
    as many parameters; with an adapter it is where `reference` names one."""

    offload_optimizer: bool = False
    offload_parameters: bool = False
    activation_offload: bool = False
    sequence_parallel: int = 1
    chunk_tokens: int = 1024
    reference: bool = False
    nccl: bool = False
    delta: bool = False
    live: int = 500_000_000
    buckets: int = 200_000_000
    lora_rank: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes: of one GPU by what they are for, and of all hosts together."""

    gpu: dict[str, float]
    host: float

    @property
    def gpu_total(self) -> float:
        return sum(self.gpu.values())


def estimate(shape: ModelShape, machine: Machine, options: MemoryOptions, sample_tokens: int) -> Estimate:
    """Of a step whose largest micro-batch is `sample_tokens`."""
    adapter = shape.adapter_parameters(options.lora_rank) if options.lora_rank else 0
    trained = adapter or shape.parameters
    share = shape.parameters / machine.gpus
    tokens = sample_tokens / options.sequence_parallel
    models = 2 if options.reference else 1
    states = 2.0 * shape.layers * shape.hidden * tokens
    # The backward pass of a layer: what it kept, gradients of the widest activations, its weights and their gradients.
    per_token = shape.saved_per_token + 6 * shape.intermediate * max(1, shape.chosen) + 12 * shape.hidden
    if adapter:  # what is between A and B of each layer, its gradient, and what is added to the widest
        per_token += 4 * 7 * options.lora_rank + 4 * shape.intermediate
    gpu = {
        "weights": 0.0 if options.offload_parameters else 2.0 * (share * models + adapter / machine.gpus),
        "gradients": 0.0 if options.offload_optimizer else 4.0 * trained / machine.gpus,
        "optimizer": 0.0 if options.offload_optimizer else 12.0 * trained / machine.gpus,
        # A bucket and what is sent of it: in float32 where gradients are reduced, half of them, in bfloat16 where weights come.
        "gathered": 2.0 * options.live + 6.0 * options.buckets + (2.0 if adapter else 8.0) * shape.head_parameters,
        # And what is between the last layer and the loss, in bfloat16: normed in float32, trained positions, gradients.
        "states": (0.0 if options.activation_offload else states) + 16.0 * shape.hidden * tokens,
        "layer": per_token * tokens + (2.0 if adapter else 4.0) * shape.layer_parameters,
        # Each sample's, in bfloat16, for one layer at a time.
        "paths": 8.0 * PATHS * shape.key_heads * shape.head_size * tokens,
        "chunk": 12.0 * options.chunk_tokens * shape.vocabulary,
        "nccl": _sending_bytes(shape) if options.nccl else 0.0,
        "reserve": float(RESERVE_BYTES),
    }
    # In the host: 12 bytes of state, 4 of accumulated gradients and 4 of those that Adam reads, per parameter.
    host = (
        20.0 * trained * options.offload_optimizer
        + 2.0 * models * shape.parameters * options.offload_parameters
        + 2.0 * shape.parameters * options.delta
    )
    return Estimate(gpu, host + states * machine.gpus * options.activation_offload)


def _sending_bytes(shape: ModelShape) -> float:
    """Largest tensors are packed and gathered alone, whatever a buffer or a bucket is to hold. Each end of the transfer has two
    buffers; the sender gathers one bucket, copies it, and has some waiting."""
    from steno_trainer.weights.nccl.transport import PACKED_BUFFERS, PACKED_BYTES, QUEUED_BUCKETS
    from steno_trainer.weights.source import DEFAULT_BUCKET_BYTES

    largest = 2.0 * shape.head_parameters
    return PACKED_BUFFERS * (PACKED_BYTES + largest) + (QUEUED_BUCKETS + 2) * max(DEFAULT_BUCKET_BYTES, largest)


def longest_sample(shape: ModelShape, machine: Machine, options: MemoryOptions, granule: int = 1024) -> int:
    """Tokens of the longest sample that fits, in multiples of `granule`; 0: nothing does."""

    def fits(tokens: int) -> bool:
        found = estimate(shape, machine, options, tokens)
        return found.gpu_total <= machine.gpu_bytes * (1 - FRAGMENTED) and found.host <= machine.host_bytes

    low, high = 0, 2**24 // granule
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * granule) else (low, middle - 1)
    return low * granule


SAMPLES: dict[str, tuple[str, ModelShape, MemoryOptions]] = {
    "7b": (
        "Qwen2.5-7B",
        ModelShape(3584, 18944, 28, 28, 4, 128, 152064, attention_bias=True),
        MemoryOptions(),
    ),
    "14b": (
        "Qwen2.5-14B",
        ModelShape(5120, 13824, 48, 40, 8, 128, 152064, attention_bias=True),
        MemoryOptions(offload_optimizer=True),
    ),
    "32b": (
        "Qwen2.5-32B",
        ModelShape(5120, 27648, 64, 40, 8, 128, 152064, attention_bias=True),
        MemoryOptions(offload_optimizer=True, live=300_000_000, buckets=100_000_000),
    ),
}  # fmt: skip
"""Name of the sample configuration in deploy/deepspeed -> the model it is for, its shape, its choices."""


def table(machine: Machine = Machine()) -> str:
    """Markdown: a row per sample configuration, plain and with what makes samples longer."""
    head = (
        "model", "choices", "weights, gradients, optimizer", "gathered", "chunk", "per 1,024 tokens", "host",
        "longest sample",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (model, shape, plain) in SAMPLES.items():
        for extra, options in _variants(shape, plain):
            found = estimate(shape, machine, options, 1024).gpu
            longest = longest_sample(shape, machine, options)
            host = estimate(shape, machine, options, longest).host
            static = found["weights"] + found["gradients"] + found["optimizer"]
            per_kilo = found["states"] + found["layer"] + found["paths"] - 4.0 * shape.layer_parameters
            cells = (
                f"{model} (`{name}`)", extra, *(_gib(b) for b in (static, found["gathered"], found["chunk"], per_kilo, host)),
                f"{longest:,}" if longest else "does not fit",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


LORA_RANK = 32
"""Of the table."""


def lora_table() -> str:
    """Markdown: an adapter of the models in the table, on one GPU or eight."""
    head = (
        "model",
        "GPUs",
        "choices",
        "weights",
        "gradients, optimizer",
        "gathered",
        "per 1,024 tokens",
        "longest sample",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    cases = [("7b", 1, False), ("7b", 1, True), ("14b", 1, False), ("32b", 8, False), ("32b", 8, True)]
    for name, gpus, offload in cases:
        model, shape, _ = SAMPLES[name]
        machine = Machine(gpus, host_bytes=1200 * 10**9 * gpus // 8)
        options = MemoryOptions(lora_rank=LORA_RANK, activation_offload=offload)
        found = estimate(shape, machine, options, 1024).gpu
        longest = longest_sample(shape, machine, options)
        per_kilo = found["states"] + found["layer"] + found["paths"] - 2.0 * shape.layer_parameters
        cells = (
            model, str(gpus), "`activation_offload`" if offload else "none",
            *(_gib(b) for b in (found["weights"], found["gradients"] + found["optimizer"], found["gathered"], per_kilo)),
            f"{longest:,}" if longest else "does not fit",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _variants(shape: ModelShape, plain: MemoryOptions) -> Iterator[tuple[str, MemoryOptions]]:
    sample = " (the sample)"
    yield "none" + sample * (not plain.offload_optimizer), replace(plain, offload_optimizer=False)
    yield "`offload_optimizer`" + sample * plain.offload_optimizer, replace(plain, offload_optimizer=True)
    yield "both offloads", replace(plain, offload_optimizer=True, activation_offload=True)
    ranks = max(
        n for n in (1, 2, 4, 8) if shape.heads % n == 0 and max(shape.key_heads, n) % min(shape.key_heads, n) == 0
    )
    yield f"the sample's, `sequence_parallel` {ranks}", replace(plain, sequence_parallel=ranks)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.05 * GIB else ("0" if not size else f"{size / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a training step, estimated from shapes")
    parser.add_argument(
        "--config", type=Path, help="a model's config.json; without: the table of the sample configurations"
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of all nodes together")
    parser.add_argument("--gpu-gib", type=float, default=80, help="memory of each GPU")
    parser.add_argument("--host-gb", type=float, default=1200, help="memory of all nodes together")
    parser.add_argument("--tokens", type=int, help="tokens of the longest sample; default: the longest that fits")
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share each sample")
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="rank of the adapter; default: the whole model is trained"
    )
    parser.add_argument(
        "--reference", action="store_true", help="a second model is loaded; with --lora-rank: `reference` names one"
    )
    for flag in ("offload-optimizer", "offload-parameters", "activation-offload", "nccl", "delta"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = parser.parse_args()
    machine = Machine(given.gpus, int(given.gpu_gib * GIB), int(given.host_gb * 10**9))
    if given.config is None:
        print(table(machine))
        print(f"\nAdapters of rank {LORA_RANK}:\n")
        print(lora_table())
        return
    try:
        shape = ModelShape.of(json.loads(given.config.read_text()))
    except ConfigError as error:
        parser.error(str(error))
    options = MemoryOptions(
        given.offload_optimizer, given.offload_parameters, given.activation_offload, given.sequence_parallel,
        given.chunk_tokens, given.reference, given.nccl, given.delta, lora_rank=given.lora_rank,
    )  # fmt: skip
    longest = longest_sample(shape, machine, options)
    tokens = given.tokens or longest
    found = estimate(shape, machine, options, tokens)
    active = f", {shape.active_parameters / 1e9:.2f} B active per token" if shape.experts else ""
    print(
        f"{shape.parameters / 1e9:.2f} B parameters{active}; a sample of {tokens:,} tokens takes, on each of {given.gpus} GPUs:"
    )
    for what, size in found.gpu.items():
        print(f"  {what:10} {_gib(size):>10}")
    print(f"  {'together':10} {_gib(found.gpu_total):>10} of {_gib(machine.gpu_bytes * (1 - FRAGMENTED))}")
    print(f"  all hosts  {_gib(found.host):>10} of {_gib(machine.host_bytes)}")
    print(f"The longest sample that fits: {longest:,} tokens")


if __name__ == "__main__":
    main()
