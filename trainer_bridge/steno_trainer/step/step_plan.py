"""What the first rank tells all others at the start of a step: the samples, and the plan of every pass over them.

Only the first rank has data. It draws up the orders from the batch and the settings, and every rank carries out its part of
them; nothing else is decided anywhere. Pure: values in, values out.

Shapes: T tokens of one sample.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from steno_trainer.data.advantages import AnyEstimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.rows import TrainingRow, drop_groups
from steno_trainer.data.staleness import StalenessVerdict
from steno_trainer.errors import BadBatch
from steno_trainer.objective.aggregation import Aggregation, SampleShare, SilentTotals, token_weights
from steno_trainer.packing.forest import Forest
from steno_trainer.packing.plan import CostModel, PackingItem, PackingPlan, plan_step


@dataclass(frozen=True)
class StepBatch:
    """What a step trains. advantages: by trial, of every trial that a row is of. silent: groups whose rewards are all equal.
    Order of the rows changes nothing."""

    rows: Sequence[TrainingRow]
    advantages: Mapping[str, float]
    silent: SilentTotals = field(default_factory=SilentTotals)


@dataclass(frozen=True)
class Layout:
    """How a step is cut. packs: micro-batches that run at once. alone: one sample each. share: each token of a micro-batch is
    computed once, whichever samples have it. The rest as in the settings."""

    packs: int
    budget_tokens: int
    chunk_tokens: int
    aggregation: Aggregation
    constant_tokens: int | None
    cost: CostModel
    epochs: int = 1
    mini_batches: int = 1
    alone: bool = False
    share: bool = False


class OptimizerPass(msgspec.Struct, frozen=True, array_like=True):
    """One optimizer step. rows: indices into the orders' rows; the plan's indices are into this list. weights: of these rows."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    plan: PackingPlan


class SentRow(msgspec.Struct, frozen=True, array_like=True):
    """A `TrainingRow` in bytes: arrays as raw little-endian ones."""

    trial_id: str
    group_id: str
    token_ids: bytes
    loss_mask: bytes
    sampling_logprobs: bytes
    temperatures: bytes
    version_index: bytes
    versions: tuple[str, ...]
    completion_starts: tuple[int, ...]


class StepOrders(msgspec.Struct, frozen=True, array_like=True):
    """scoring: the plan by which log-probabilities are computed before the first pass, where some are needed. share: as in the
    layout."""

    sent: tuple[SentRow, ...]
    advantages: dict[str, float]
    passes: tuple[OptimizerPass, ...]
    scoring: PackingPlan
    share: bool

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> StepOrders:
        """Raises: BadBatch: not encoded orders."""
        try:
            return msgspec.msgpack.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise BadBatch(f"not the orders of a step: {error}") from error

    def rows(self) -> list[TrainingRow]:
        """Without their verdicts, which nobody needs after the batch was made."""
        return [_received(row) for row in self.sent]

    def check(self, rows: Sequence[TrainingRow]) -> None:
        """Whether every plan is one of these rows. Raises: BadPlan."""
        items, forest = packing_items(rows), forest_of(rows, self.share)
        self.scoring.check(items, forest)
        for part in self.passes:
            part.plan.check([items[i] for i in part.rows], forest.only(part.rows))


def draw_up(batch: StepBatch, layout: Layout, *, seed: str) -> StepOrders:
    """The orders of a step.

    Mini-batches are cut between trials, so that a trial's samples stay together, in an order that `seed` alone decides; each is
    weighed as if it were the step. Where fewer trials than mini-batches are left to train, each is one.

    Raises: BadBatch: no rows, a trial without an advantage. BadPlan: a row over the budget.
    """
    rows = batch.rows
    if not rows:
        raise BadBatch("a step without samples: skip it, its tokens are in the ledger already")
    missing = sorted({row.trial_id for row in rows} - batch.advantages.keys())
    if missing:
        raise BadBatch(f"no advantage for trial {', '.join(missing)}")
    share = layout.share and not layout.alone
    items, forest = packing_items(rows), forest_of(rows, share)
    passes = []
    for epoch in range(layout.epochs):
        cut = _mini_batches(rows, layout.mini_batches, f"{seed}:{epoch}")
        silent = batch.silent.share(len(cut))
        for part in cut:
            parts = [SampleShare(rows[i].trial_id, items[i].trained) for i in part]
            weights = token_weights(parts, layout.aggregation, layout.constant_tokens, silent)
            plan = _plan([items[i] for i in part], forest.only(part), layout)
            passes.append(OptimizerPass(tuple(part), tuple(weights), plan))
    trials = {row.trial_id for row in rows}
    return StepOrders(
        sent=tuple(_sent(row) for row in rows),
        advantages={trial: batch.advantages[trial] for trial in sorted(trials)},
        passes=tuple(passes),
        scoring=_plan(items, forest, layout),
        share=share,
    )


def make_batch(
    rows: Sequence[TrainingRow],
    scored: Sequence[ScoredTrial],
    estimator: AnyEstimator | None,
    ledger: Ledger,
    *,
    count_silent: bool = True,
    train_silent: bool = False,
) -> tuple[StepBatch, dict[str, Reason]]:
    """From rows to a batch: advantages over all scored trials of the step's groups, rows of groups that say nothing booked.

    Args:
        estimator: None: nobody asks for rewards; all rows are kept, with advantages of 1.
        scored: every trial with a reward, also those of which no sample is left: they are part of their group's mean.
        count_silent: groups whose rewards are all equal count in what a token's loss is divided by.
        train_silent: groups that say nothing are kept, with advantages of 0: a teacher scores their tokens.
    Returns: the batch (its rows may be none), and the groups that say nothing, or can't be trained.
    """
    if estimator is None:
        return StepBatch(rows, dict.fromkeys((row.trial_id for row in rows), 1.0)), {}
    found = group_advantages(scored, estimator)
    if train_silent:
        malformed = {group: why for group, why in found.dropped.items() if why is Reason.MALFORMED}
        silent = {trial.trial_id: 0.0 for trial in scored if trial.group_id in found.dropped.keys() - malformed.keys()}
        return StepBatch(drop_groups(rows, malformed, ledger), found.by_trial | silent), found.dropped
    quiet = [row for row in rows if found.dropped.get(row.group_id) is Reason.ZERO_VARIANCE] if count_silent else []
    totals = SilentTotals.of([SampleShare(row.trial_id, row.trained_tokens) for row in quiet])
    return StepBatch(drop_groups(rows, found.dropped, ledger), found.by_trial, totals), found.dropped


def _plan(items: Sequence[PackingItem], forest: Forest, layout: Layout) -> PackingPlan:
    return plan_step(
        items,
        forest,
        ranks=layout.packs,
        budget_tokens=layout.budget_tokens,
        chunk_tokens=layout.chunk_tokens,
        cost=layout.cost,
        alone=layout.alone,
    )


def packing_items(rows: Sequence[TrainingRow]) -> list[PackingItem]:
    return [PackingItem(row.tokens, row.trained_tokens) for row in rows]


def forest_of(rows: Sequence[TrainingRow], share: bool) -> Forest:
    return Forest.of([row.token_ids_T.numpy() for row in rows]) if share else Forest.apart(len(rows))


def _mini_batches(rows: Sequence[TrainingRow], count: int, seed: str) -> list[list[int]]:
    trials = sorted({row.trial_id for row in rows})
    count = min(count, len(trials))
    if count == 1:
        return [list(range(len(rows)))]
    random.Random(seed).shuffle(trials)
    part_of = {trial: i * count // len(trials) for i, trial in enumerate(trials)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, row in enumerate(rows):
        parts[part_of[row.trial_id]].append(i)
    return parts


def _sent(row: TrainingRow) -> SentRow:
    return SentRow(
        trial_id=row.trial_id,
        group_id=row.group_id,
        token_ids=_bytes(row.token_ids_T.to(torch.int32)),
        loss_mask=_bytes(row.loss_mask_T),
        sampling_logprobs=_bytes(row.sampling_logprobs_T),
        temperatures=_bytes(row.temperatures_T),
        version_index=_bytes(row.version_T.to(torch.int16)),
        versions=row.versions,
        completion_starts=row.completion_starts,
    )


def _received(sent: SentRow) -> TrainingRow:
    return TrainingRow(
        trial_id=sent.trial_id,
        group_id=sent.group_id,
        token_ids_T=_tensor(sent.token_ids, torch.int32).long(),
        loss_mask_T=_tensor(sent.loss_mask, torch.bool),
        sampling_logprobs_T=_tensor(sent.sampling_logprobs, torch.float32),
        temperatures_T=_tensor(sent.temperatures, torch.float32),
        version_T=_tensor(sent.version_index, torch.int16).long(),
        versions=sent.versions,
        verdict=StalenessVerdict(None),
        completion_starts=sent.completion_starts,
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _tensor(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype)
