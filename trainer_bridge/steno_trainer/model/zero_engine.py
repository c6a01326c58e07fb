"""The policy under ZeRO-3: opened once, then forward, backward and update, the same calls on every rank.

Owns the DeepSpeed engines (the policy's, and the frozen reference's where there is one) and everything DeepSpeed has to be told
apart: that it divides gradients by ranks, that it clips by default, that a rate is set before a step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steno.contracts.errors import ConfigError
from steno_trainer.config import TrainerSettings
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.adapter import add_adapter, without_adapter
from steno_trainer.model.coverage import examine
from steno_trainer.model.deepspeed_config import deepspeed_config, reference_config, start_deepspeed
from steno_trainer.model.model import PolicyModel, cost_model, load_model
from steno_trainer.model.model_config import positions
from steno_trainer.model.same_tokens import CommonTokens, common_tokens
from steno_trainer.model.sequence_parallel import RankShare
from steno_trainer.model.sharing import why_not_shared
from steno_trainer.model.sizes import full_numel
from steno_trainer.packing.plan import CostModel

log = logging.getLogger(__name__)


class PolicyEngine:
    """ranks, cost, alone (whether each sample gets a call of its own), shares (whether samples share the tokens that they begin
    alike with) and context_tokens (the longest sample that the model takes) are the run's; `deepspeed` and `reference` are
    DeepSpeed's engines, `lm` the transformers model (its parameters are partitioned)."""

    def __init__(
        self, ranks: Ranks, settings: TrainerSettings, deepspeed: Any, reference: Any | None, cost: CostModel
    ) -> None:
        self.ranks = ranks
        self.settings = settings
        self.deepspeed = deepspeed
        self.reference = reference
        self.cost = cost
        self.alone = False
        self.shares = True
        self.common = CommonTokens()

    @classmethod
    def open(cls, settings: TrainerSettings, ranks: Ranks) -> PolicyEngine:
        """Load the model and, if it is asked for, the reference. A collective.

        Raises: ConfigError: the model is not covered, or settings do not fit it; names the field.
        """
        common = CommonTokens()
        if settings.reference is not None:
            common = common_tokens(settings.model, settings.reference, trust_remote_code=settings.trust_remote_code)
            if common.warning and ranks.first:
                log.warning("%s", common.warning)
        random.seed(settings.seed + ranks.pack)
        torch.manual_seed(settings.seed + ranks.pack)
        cuda = ranks.device.type == "cuda"
        zero = deepspeed_config(settings, cuda=cuda)
        start_deepspeed(cuda=cuda, own_kernels=settings.offload_optimizer and cuda)
        policy = _load(settings.model, settings, zero, training=True)
        _check_heads(policy.lm.config, ranks.sequence_size)
        if settings.micro_batch_tokens % ranks.sequence_size:
            raise ConfigError(
                f"micro_batch_tokens: got {settings.micro_batch_tokens}, must be a multiple of sequence_parallel, "
                f"{ranks.sequence_size}",
                field="micro_batch_tokens",
            )
        cost = cost_model(policy.lm, frozen=settings.lora_rank is not None)
        if settings.lora_rank is not None:
            add_adapter(
                policy.lm, rank=settings.lora_rank, alpha=settings.lora_alpha, targets=settings.lora_targets,
                seed=settings.seed,
            )  # fmt: skip
        reference = None
        if settings.scores_reference and (settings.lora_rank is None or settings.reference is not None):
            frozen = reference_config(zero)
            reference = _initialize(_load_reference(settings, frozen, ranks), frozen)
        engine = cls(ranks, settings, _initialize(policy, zero), reference, cost)
        engine.common = common
        engine._examine()
        if ranks.first:
            engine.tell_lengths()
        return engine

    def tell_lengths(self) -> None:
        """In the log, which of the models takes shorter samples than a micro-batch holds."""
        own = positions(self.lm.config)
        if own < self.settings.micro_batch_tokens:
            log.info(
                "model: it takes %d tokens, fewer than micro_batch_tokens: longer samples are not trained (too_long)",
                own,
            )
        if self.context_tokens < min(self.settings.micro_batch_tokens, own):
            log.warning(
                "reference: it takes %d tokens, fewer than the model: longer samples are not trained (too_long)",
                self.context_tokens,
            )

    def _examine(self) -> None:
        """Set `alone` and `shares`. A collective. Raises: ConfigError: a model is not covered."""
        asked = [(self.deepspeed, self.settings.model)]
        if self.reference is not None:
            asked.append((self.reference, self.settings.reference or self.settings.model))
        for model, name in asked:
            precision, longest = self.settings.precision, self.context_tokens
            if examine(model, self.ranks, name=name, precision=precision, longest=longest) is not None:
                self.alone, self.shares = True, False
                continue
            why = why_not_shared(model, self.ranks, name=name, precision=precision, longest=longest)
            if why is not None:
                self.shares = False
                if self.ranks.first:
                    log.warning(
                        "model %s: the common beginning of samples is computed anew for each sample: %s", name, why
                    )
        if self.reference is not None:
            self.reference.module.eval()

    @property
    def lm(self) -> Any:
        return self.deepspeed.module.lm

    @property
    def parameters(self) -> int:
        """Elements of the whole model, on all ranks together."""
        return sum(full_numel(parameter) for parameter in self.lm.parameters())

    @property
    def vocabulary(self) -> int:
        """Ids in samples must be below it: the reference scores them too."""
        sizes = [int(model.config.vocab_size) for model in self._models]
        return min(sizes) if self.common.below is None else min(*sizes, self.common.below)

    @property
    def context_tokens(self) -> int:
        """The longest sample that can be trained: what a micro-batch holds, and what the models take."""
        return min(self.settings.micro_batch_tokens, *(positions(model.config) for model in self._models))

    @property
    def _models(self) -> list[Any]:
        """transformers' models: the policy, and the reference if it is another one."""
        return [self.lm] if self.reference is None else [self.lm, self.reference.module.lm]

    def logprobs(self, share: RankShare, chunks: int) -> tuple[Tensor, Tensor]:
        """With gradients. A collective, as are all below."""
        self.deepspeed.train()
        found: tuple[Tensor, Tensor] = self.deepspeed(share.packed, share.segments, chunks)
        return found

    @torch.no_grad()
    def score(self, share: RankShare, chunks: int, *, reference: bool) -> Tensor:
        """Log-probabilities without gradients, by the policy as it is or by the reference. [N] float32."""
        engine: Any = self.reference if reference and self.reference is not None else self.deepspeed
        engine.eval()
        with without_adapter(self.lm) if reference and self.reference is None else contextlib.nullcontext():
            found: tuple[Tensor, Tensor] = engine(share.packed, share.segments, chunks)
        return found[0]

    @torch.no_grad()
    def logits(self, share: RankShare) -> Tensor:
        """Of the trained tokens of this rank's share, before any is chosen. [N, V] float32."""
        self.deepspeed.eval()
        found: tuple[Tensor, Tensor] = self.deepspeed(share.packed, share.segments, 1, logits=True)
        return found[0]

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, as it is: global weights are in it already, and DeepSpeed's average over ranks is
        undone."""
        self.deepspeed.backward(loss * self.ranks.size, scale_wrt_gas=False)

    def update(self, learning_rate: float, *, skip: bool = False) -> float | None:
        """One optimizer step with the gradients so far, which are then gone.

        Args: skip: take no step whatever the gradients are.
        Returns: their norm before clipping; None: no step was taken, since the norm is no finite number or `skip` was asked for.
            Weights and the optimizer's state are as before then.
        """
        if skip:
            # The next backward writes over the gradients; `deepspeed.step()` would take the step if they are finite. A value put
            # into them to stop it can stay: DeepSpeed never writes the padding of a partition again.
            self.deepspeed.optimizer.zero_grad()
            return None
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        if not self.deepspeed.was_step_applied():
            return None
        norm = self.deepspeed.get_global_grad_norm()
        return math.nan if norm is None else float(norm)


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Of the step after `step` finished ones: linear warm-up, then as `schedule` says, down to 0 at `total_steps`. A function
    of the step alone, so that there is nothing to be saved."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant" or settings.total_steps is None:
        return settings.learning_rate
    span = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * left


def _load(path: str, settings: TrainerSettings, zero: Mapping[str, Any], *, training: bool) -> PolicyModel:
    return load_model(
        path, precision=settings.precision, zero=zero, longest=settings.micro_batch_tokens,
        checkpointing=training and settings.activation_checkpointing,
        offload_activations=training and settings.activation_offload, trust_remote_code=settings.trust_remote_code,
    )  # fmt: skip


def _load_reference(settings: TrainerSettings, zero: Mapping[str, Any], ranks: Ranks) -> PolicyModel:
    name = settings.reference or settings.model
    try:
        found = _load(name, settings, zero, training=False)
        _check_heads(found.lm.config, ranks.sequence_size)
    except ConfigError as error:
        raise ConfigError(f"reference {name}: {error.message}", field="reference") from error
    return found


def _initialize(model: PolicyModel, zero: Mapping[str, Any]) -> Any:
    import deepspeed

    trained = {"model_parameters": [p for p in model.parameters() if p.requires_grad]} if "optimizer" in zero else {}
    engine, *_ = deepspeed.initialize(model=model, config=dict(zero), **trained)
    return engine


def _check_heads(config: Any, ranks: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # no attention; `coverage` refuses to cut the samples of such a model
        return
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or max(groups, ranks) % min(groups, ranks):
        raise ConfigError(
            f"sequence_parallel: {heads} heads over {groups} key heads can't be divided among {ranks} ranks",
            field="sequence_parallel",
        )
