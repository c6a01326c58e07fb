"""Checks at load whether the trainer computes a model's log-probabilities exactly, and whether samples can share a call.

Owns the examination of the loaded model: a few forward passes over short samples, by all ranks in step. Layers with a state in
transformers (recurrent, convolutional) run over packed samples as if they were one, on their torch fallbacks at least, and say
nothing: so no list of names is relied on where the model itself can be asked. What its configuration tells is `model_config.py`.

Shapes: M tokens of the sample that is looked at, less its first one.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steno.contracts.errors import ConfigError
from steno_trainer.data.rows import all_trained
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import BadBatch
from steno_trainer.model.model import PolicyModel
from steno_trainer.model.model_config import STATEFUL, layer_kinds, rope_kind, rope_parameters
from steno_trainer.model.sequence_parallel import take_share
from steno_trainer.packing.collate import collate

log = logging.getLogger(__name__)

BY_LENGTH = frozenset({"longrope", "dynamic"})
"""Rotary embeddings whose frequencies depend on the longest sample of the call."""

BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 0.15)}
"""Precision -> by how many nats a token of a mixture of experts may differ, if another sample in the same call does (an expert's
work is rounded by how many tokens it gets); by how many the mean over a sample may differ from transformers' own pass."""

CONTEXT_TOKENS, SAMPLE_TOKENS = 37, 48
"""Lengths of the two samples. No multiples of layers' chunks (64, 128, 256): a chunk holds parts of both."""


def keeps_state(lm: nn.Module) -> bool:
    """Whether a token reaches later ones by another way than attention: a convolution, or a recurrent state."""
    if STATEFUL & {*layer_kinds(lm.config)}:
        return True
    named = any(name.rsplit(".", 1)[-1] in ("A_log", "dt_bias", "time_decay") for name, _ in lm.named_parameters())
    return named or any(isinstance(module, nn.Conv1d) for module in lm.modules())


def has_experts(lm: nn.Module) -> bool:
    return any(".experts." in name for name, _ in lm.named_parameters())


def examine(engine: Any, ranks: Ranks, *, name: str, precision: str, longest: int) -> str | None:
    """Ask the loaded model. A collective: every rank makes the same three or four forward passes of up to 85 tokens.

    1. (A, B) packed, and (A', B) packed: other ids in A, the same lengths. B's log-probabilities must be the same to the bit
       (within `BOUNDS` for a mixture of experts without a state). If they are not, each sample needs a call of its own.
    2. B as the step will compute it, and B by the model's own forward pass and transformers' own attention: what our attention
       or head leaves out shows here.

    Args: engine: DeepSpeed's, around a `PolicyModel`. longest: tokens of the longest sample.
    Returns: why each sample needs a call of its own; None: it does not.
    Raises: ConfigError: names the model and what differs, in nats.
    """
    model: PolicyModel = engine.module
    lm = model.lm
    state = keeps_state(lm)
    if state and ranks.sequence_size > 1:
        raise ConfigError(
            f"model {name}: it has layers with a state (recurrent or convolutional), whose samples can't be cut: "
            f"sequence_parallel is {ranks.sequence_size}, allowed: 1",
            field="sequence_parallel",
        )
    rounding, apart = BOUNDS[precision]
    bound = rounding if has_experts(lm) and not state else 0.0
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(lm.config.vocab_size)
    lengths = (CONTEXT_TOKENS, CONTEXT_TOKENS, min(SAMPLE_TOKENS, longest))
    before, other, sample = (torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths)
    windows: list[int | None] = []
    try:
        first_M = score_samples(engine, ranks, [before, sample], windows)
        _check_windows(lm, windows, name=name, longest=longest)
        if not first_M.isfinite().all():
            # Spoiled weights compare with nothing. The step's loss is no number either, and says so before any weight changes.
            log.warning("model %s: its log-probabilities are NaN or infinite; it could not be examined", name)
            return "its log-probabilities are NaN or infinite"
        second_M = score_samples(engine, ranks, [other, sample])
        why, ours_M = None, first_M
        leaked = float((first_M - second_M).abs().max())
        if not leaked <= bound:
            again = float((score_samples(engine, ranks, [before, sample]) - first_M).abs().max())
            if not again <= max(bound, apart):
                raise ConfigError(
                    f"model {name}: the same tokens get other log-probabilities in the next pass, by up to {again:.3g} nats, "
                    f"allowed: {max(bound, apart)}; a part of it is random while training, as dropout is",
                    field="model",
                )
            why = f"other ids in one sample change the next one's log-probabilities, by up to {leaked:.2g} nats"
        elif BY_LENGTH.intersection(map(rope_kind, rope_parameters(lm.config))):
            why = "its rotary embedding depends on the longest sample of a call"
        if why is not None:
            ours_M = score_samples(engine, ranks, [sample])
        plain_M = _score_plainly(engine, ranks, sample)
    except (BadBatch, AttributeError, KeyError, TypeError, ValueError) as error:
        what = error if isinstance(error, BadBatch) else f"a forward pass fails: {type(error).__name__}: {error}"
        raise ConfigError(f"model {name}: {what}", field="model") from error
    found = float((ours_M - plain_M).abs().mean())
    if not found <= apart:
        raise ConfigError(
            f"model {name}: log-probabilities differ from transformers' own by {found:.3g} nats in the mean, allowed in "
            f"{precision}: {apart}; the trainer does not compute all of this model's attention or head, so it can't be trained",
            field="model",
        )
    if why is not None and ranks.first:
        log.warning("model %s: samples are not packed, each gets a forward pass of its own: %s", name, why)
    return why


def _check_windows(lm: Any, told: Sequence[int | None], *, name: str, longest: int) -> None:
    """Whether attention was told of as many windows as the configuration has. Those that only masks know would be left out."""
    config = lm.config
    window = getattr(config, "sliding_window", None)
    if not window or window >= longest or getattr(config, "use_sliding_window", True) is False:
        return
    kinds = layer_kinds(config)
    expected = sum("sliding" in kind for kind in kinds) if kinds else len(told)
    found = sum(one is not None for one in told)
    if found != expected:
        raise ConfigError(
            f"model {name}: sliding_window is {window} in {expected} layers, and attention was called with it in {found}; "
            f"allowed: {longest} or more, the longest sample (lower micro_batch_tokens to it)",
            field="model",
        )


def score_samples(
    engine: Any,
    ranks: Ranks,
    samples: Sequence[Sequence[int]],
    windows: list[int | None] | None = None,
    *,
    share: bool = False,
) -> Tensor:
    """Log-probabilities of the last sample, as in a step: packed, and cut for ranks that share. float32 [M]. A collective.

    Args: windows: filled with what attention is told. share: samples share what they begin alike with.
    """
    rows = [all_trained(ids) for ids in samples]
    packed = collate(rows, {"probe": 0.0}, [0.0] * len(rows), share=share).to(ranks.device)
    part = take_share(packed, ranks=ranks.sequence_size, rank=ranks.sequence_rank, group=ranks.sequence)
    segments = part.segments if windows is None else replace(part.segments, windows=windows)
    with _passing(engine):
        mine_n = engine(part.packed, segments, 1)[0].float().cpu()
    found_N = torch.zeros(len(packed.targets_N))
    if ranks.pack == 0:  # all packs score the same tokens, since all must make the call
        found_N[part.chosen.cpu()] = mine_n
    return ranks.add(found_N)[1 - len(samples[-1]) :]


def _score_plainly(engine: Any, ranks: Ranks, ids: Sequence[int]) -> Tensor:
    """Of a sample, by transformers alone."""
    packed = collate([all_trained(ids)], {"probe": 0.0}, [0.0]).to(ranks.device)
    lm = engine.module.lm
    ours = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    try:
        with _passing(engine):
            mine_M = engine(packed, None, 1)[0].float().cpu()
    finally:
        lm.set_attn_implementation(ours)
    return ranks.add(mine_M if ranks.first else torch.zeros_like(mine_M))


@contextlib.contextmanager
def _passing(engine: Any) -> Iterator[None]:
    """Without gradients, but as in training: what is random there must show."""
    engine.train()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # of recomputed layers
        yield
