"""One optimisation step, from the first rank's batch to new weights on all of them.

Reads in the order that devices see it. The step's loss and gradient do not depend on how many ranks there are, how samples are
packed or into how many micro-batches: weights are global, and what DeepSpeed averages is multiplied back (docs/objective.md).

Shapes: N trained tokens of the whole step, in the order of the orders' rows; n those of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from resource import RUSAGE_SELF, getrusage

import torch
from torch import Tensor

from steno_trainer.config import TrainerSettings
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.rows import TrainingRow
from steno_trainer.model.sequence_parallel import RankShare, take_share
from steno_trainer.model.zero_engine import PolicyEngine, learning_rate
from steno_trainer.objective import loss as objective_
from steno_trainer.objective.aggregation import Aggregation
from steno_trainer.objective.loss import MAXIMA, MEANS, Objective, Tokens, policy_loss
from steno_trainer.objective.mismatch import Correction, CorrectionLevel, Mismatch
from steno_trainer.objective.own import objective_named
from steno_trainer.objective.ratios import CLIP, RatioLevel, Sequences
from steno_trainer.objective.registry import REGISTRY
from steno_trainer.packing.collate import PackedBatch, collate
from steno_trainer.packing.plan import CostModel, Size
from steno_trainer.step.step_plan import (
    Layout,
    OptimizerPass,
    StepBatch,
    StepOrders,
    draw_up,
    forest_of,
    packing_items,
)

SCALARS = (
    "loss", "optimizer/grad_norm", "optimizer/learning_rate", "optimizer/skipped_passes", "pack/balance", "pack/fill",
    "pack/micro_batches", "compute/unique_tokens", "compute/repeated_tokens", "throughput/tokens_per_s", "throughput/mfu",
    "time/score_s", "time/train_s", "memory/peak_bytes",
)  # fmt: skip
"""What a step reports besides the loss's own metrics (`loss.MEANS`, `loss.MAXIMA`). What each one means: docs/objective.md."""

PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}
"""bfloat16 without sparsity, from NVIDIA's data sheets; by a word of the device's name."""


@dataclass(frozen=True)
class StepReport:
    """The same on every rank. metrics: scalars by name; what was not measured is absent. ledger: what of this step was trained
    and what was not; to be added to the run's when the step is durable. updated: whether any weight was changed. poisoned: group
    id -> why a pass with samples of it was skipped; which of the pass's groups is to blame is not known.
    differences_N: where `annotate` is set, the trainer's log-probability of each trained token minus the sampler's: when the step
    first ran it, which is before any update where there is one pass. float32."""

    step: int
    metrics: dict[str, float]
    ledger: Ledger
    trained_tokens: int
    updated: bool = True
    poisoned: dict[str, str] = field(default_factory=dict)
    differences_N: Tensor | None = None


class _Seen:
    """Of each trained token of the step that this rank has run first: how the trainer's log-probability differed from the
    sampler's. 0 for the others, so that the sum over ranks is each token's value: later passes may run it on another rank."""

    def __init__(self, passes: Sequence[OptimizerPass], slots: Sequence[int]) -> None:
        self.differences_N = torch.zeros(slots[-1])
        self._first_N = torch.full((slots[-1],), -1)
        for number in reversed(range(len(passes))):
            self._first_N[_positions(passes[number].rows, slots)] = number

    def note(self, number: int, where: Tensor, logprobs_n: Tensor, sampled_n: Tensor) -> None:
        """Args: number: of the pass. where: this call's tokens among those of the step."""
        new_n = self._first_N[where] == number
        self.differences_N[where[new_n]] = (logprobs_n.detach().float() - sampled_n).cpu()[new_n]


@dataclass
class _Sums:
    """Of one pass, on this rank."""

    loss: float = 0.0
    means_M2: Tensor = field(default_factory=lambda: torch.zeros(len(MEANS), 2, dtype=torch.float64))
    maxima_X: Tensor = field(default_factory=lambda: torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64))


class Stepper:
    """Takes steps. `steps_done` counts them (optimizer steps may be more: epochs x mini_batches of each)."""

    def __init__(self, engine: PolicyEngine, *, steps_done: int = 0) -> None:
        self.engine = engine
        self.ranks = engine.ranks
        self.settings = engine.settings
        self.steps_done = steps_done
        self._level = RatioLevel(self.settings.importance_sampling_level)
        self._objective = objective_of(self.settings)
        by_token = self._objective.mismatch.level in (None, CorrectionLevel.TOKEN)
        # What is summed over: what has one ratio, else what has one weight of the mismatch.
        self._summed = RatioLevel.SEQUENCE if self._level is RatioLevel.TOKEN and not by_token else self._level
        self._layout = _layout(self.settings, engine)

    def step(self, batch: StepBatch | None) -> StepReport:
        """One step. Collective: the first rank passes the batch, all others None; they wait for it, and all return together.

        A pass whose loss or gradient is no finite number changes no weight; its samples are booked as `poisoned`, unless another
        pass has trained them. Where no pass is left the step does not count.

        Raises: BadBatch, BadPlan: the batch can't be trained; on the first rank only, before anything was said to the others.
        """
        drawn = (
            draw_up(batch, self._layout, seed=f"{self.settings.seed}:{self.steps_done}") if batch is not None else None
        )
        # On gloo, so that waiting for data (minutes, if agents are slow) holds no device.
        orders = StepOrders.decode(self.ranks.share(drawn.encode() if drawn is not None else None))
        rows = orders.rows()
        orders.check(rows)
        work = Work.of(orders, rows, self.engine.cost)
        started = time.perf_counter()
        reference_N = self._score(orders, rows, reference=True) if self.settings.scores_reference else None
        # With a single optimizer step the policy at its start is the policy itself, and the ratio is 1.
        apart = len(orders.passes) > 1 and not self._objective.around_sampler and not self._objective.imitates
        proximal_N = self._score(orders, rows, reference=False) if apart else None
        scored = time.perf_counter()
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        slots = _slots(rows)
        masked_N = torch.zeros(slots[-1], dtype=torch.uint8)
        seen_N = _Seen(orders.passes, slots) if self.settings.annotate else None
        rate = learning_rate(self.settings, self.steps_done)
        norms: list[float] = []
        totals: list[_Sums] = []
        trained: set[int] = set()
        spoiled: dict[int, str] = {}
        for number, part in enumerate(orders.passes):
            note = partial(seen_N.note, number) if seen_N is not None else None
            total = self._reduce(self._run(part, orders, rows, slots, proximal_N, reference_N, masked_N, note))
            bad_loss = not math.isfinite(total.loss)
            norm = self.engine.update(rate, skip=bad_loss)
            if norm is None:
                why = f"the loss is {total.loss}" if bad_loss else "the gradient norm is not finite"
                spoiled |= dict.fromkeys(part.rows, why)
            else:
                norms.append(norm)
                totals.append(total)
                trained.update(part.rows)
        poisoned = {i: why for i, why in spoiled.items() if i not in trained}
        taken_out_N = self.ranks.add(masked_N) > 0
        ended = time.perf_counter()
        metrics: dict[str, float] = {}
        if totals:
            self.steps_done += 1
            metrics = objective_.means(
                torch.stack([t.means_M2 for t in totals]).sum(0), torch.stack([t.maxima_X for t in totals]).amax(0)
            )
            metrics |= {
                "loss": sum(t.loss for t in totals) / len(totals),
                "optimizer/grad_norm": sum(norms) / len(norms),
            }
        metrics |= {
            "optimizer/learning_rate": rate,
            "optimizer/skipped_passes": float(len(orders.passes) - len(totals)),
            **_packing(work, self._layout),
            **self._costs(work, scored - started, ended - scored),
        }
        groups = {rows[i].group_id: why for i, why in poisoned.items()}
        booked = _booked(rows, slots, taken_out_N, poisoned)
        differences_N = None if seen_N is None else self.ranks.add(seen_N.differences_N)
        return StepReport(self.steps_done, metrics, booked, slots[-1], bool(totals), groups, differences_N)

    def _run(
        self, part: OptimizerPass, orders: StepOrders, rows: Sequence[TrainingRow], slots: Sequence[int],
        proximal_N: Tensor | None, reference_N: Tensor | None, masked_N: Tensor,
        note: Callable[[Tensor, Tensor, Tensor], None] | None,
    ) -> _Sums:  # fmt: skip
        """Forward and backward over this rank's micro-batches of a pass. Marks in masked_N what the correction takes out."""
        sums = _Sums()
        for chunks, batch in zip(part.plan.chunks, part.plan.ranks[self.ranks.pack], strict=True):
            indices = [part.rows[i] for i in batch.items]
            share = self._share([rows[i] for i in indices], orders, [part.weights[i] for i in batch.items])
            where = _positions(indices, slots)[share.chosen.cpu()]
            packed = share.packed
            # Every rank makes this call, also with a dummy or a share in which nothing is trained: ZeRO-3 gathers weights in it.
            logprobs_n, entropies_n = self.engine.logprobs(share, chunks)
            tokens = Tokens(
                packed.sampling_logprobs_N, packed.advantages_N, packed.weights_N, packed.loss_mask_N,
                _picked(proximal_N, where, logprobs_n), _picked(reference_N, where, logprobs_n),
            )  # fmt: skip
            found = policy_loss(self._objective, tokens, logprobs_n, entropies_n, *self._sequences(packed))
            if note is not None:
                before_n = tokens.proximal_logprobs_N if tokens.proximal_logprobs_N is not None else logprobs_n
                note(where, before_n, packed.sampling_logprobs_N)
            self.engine.backward(found.total)
            sums.loss += float(found.total.detach())
            sums.means_M2 += found.sums_M2.cpu()
            sums.maxima_X = torch.maximum(sums.maxima_X, found.maxima_X.cpu())
            masked_N[where] = found.mismatch_masked_N.to("cpu", torch.uint8)
        return sums

    def _sequences(self, packed: PackedBatch) -> tuple[Sequences | None, Sequences | None]:
        """What has one ratio, and what has one weight of the mismatch where that is something else."""
        if self._summed is RatioLevel.TOKEN:
            return None, None
        found = Sequences(packed.sequence_N, packed.sequence_tokens_N, packed.sequences, self.ranks.add_shared)
        return (None, found) if self._level is RatioLevel.TOKEN else (found, None)

    def _score(self, orders: StepOrders, rows: Sequence[TrainingRow], *, reference: bool) -> Tensor:
        """Log-probabilities of all trained tokens before the step, on every rank. float32 [N]."""
        slots = _slots(rows)
        scored_N = torch.zeros(slots[-1], dtype=torch.float32)
        for chunks, batch in zip(orders.scoring.chunks, orders.scoring.ranks[self.ranks.pack], strict=True):
            share = self._share([rows[i] for i in batch.items], orders, [0.0] * len(batch.items))
            where = _positions(batch.items, slots)[share.chosen.cpu()]
            scored_N[where] = self.engine.score(share, chunks, reference=reference).float().cpu()
        # Each token is one rank's, and zero everywhere else: the sum is the value, bit by bit.
        return self.ranks.add(scored_N)

    def _share(self, rows: Sequence[TrainingRow], orders: StepOrders, weights: Sequence[float]) -> RankShare:
        packed = collate(rows, orders.advantages, weights, self._summed, share=orders.share).to(self.ranks.device)
        return take_share(
            packed, ranks=self.ranks.sequence_size, rank=self.ranks.sequence_rank, group=self.ranks.sequence
        )

    def _reduce(self, sums: _Sums) -> _Sums:
        """The pass's sums over all ranks."""
        both = self.ranks.add(torch.cat([sums.means_M2.flatten(), torch.tensor([sums.loss], dtype=torch.float64)]))
        return _Sums(float(both[-1]), both[:-1].view_as(sums.means_M2), self.ranks.maximum(sums.maxima_X))

    def _costs(self, work: Work, score_s: float, train_s: float) -> dict[str, float]:
        """Times of the slowest rank; tokens/s and MFU of the passes, forward and backward, over all devices."""
        cuda = self.ranks.device.type == "cuda"
        peak = float(torch.cuda.max_memory_allocated() if cuda else getrusage(RUSAGE_SELF).ru_maxrss * 1024)
        score_s, train_s, peak = self.ranks.maximum(
            torch.tensor([score_s, train_s, peak], dtype=torch.float64)
        ).tolist()
        found = {
            "time/score_s": score_s,
            "time/train_s": train_s,
            "throughput/tokens_per_s": work.path_tokens / train_s,
        }
        tflops = self.settings.peak_tflops or (_peak_tflops(torch.cuda.get_device_name()) if cuda else None)
        if tflops is not None:
            found["throughput/mfu"] = work.flops / train_s / (tflops * 1e12 * self.ranks.size)
        return found | {"memory/peak_bytes": peak}


@dataclass(frozen=True)
class Work:
    """The work of all passes of a step, without dummies. path_tokens: of all samples, shared tokens counted for each;
    unique_tokens: shared tokens counted once in each pass; tokens: those that are computed; flops: for these. balance: the mean
    over passes. micro_batches: of each rank."""

    path_tokens: int
    unique_tokens: int
    tokens: int
    flops: float
    balance: float
    micro_batches: int

    @classmethod
    def of(cls, orders: StepOrders, rows: Sequence[TrainingRow], cost: CostModel) -> Work:
        items, forest = packing_items(rows), forest_of(rows, orders.share)
        sizes, flops, balances = [], 0.0, []
        for part in orders.passes:
            mine, here = [items[i] for i in part.rows], forest.only(part.rows)
            sizes.append(Size.of(range(len(mine)), mine, here))
            flops += sum(map(sum, part.plan.flops(mine, here, cost)))
            balances.append(part.plan.balance(mine, here, cost))
        return cls(
            path_tokens=sum(size.paths for size in sizes),
            unique_tokens=sum(size.tokens for size in sizes),
            tokens=sum(part.plan.tokens for part in orders.passes),
            flops=flops,
            balance=sum(balances) / len(balances),
            micro_batches=sum(len(part.plan.chunks) for part in orders.passes),
        )


def objective_of(settings: TrainerSettings) -> Objective:
    """Raises: ConfigError: names `objective`: as `objective_named`."""
    entry = REGISTRY.get(settings.objective)
    usual = CLIP[RatioLevel(settings.importance_sampling_level)]
    low, high = usual if entry is None or entry.clip is None else entry.clip
    return Objective(
        clip_low=low if settings.clip_low is None else settings.clip_low,
        clip_high=high if settings.clip_high is None else settings.clip_high,
        mismatch=Mismatch(
            Correction(settings.mismatch), settings.mismatch_low, settings.mismatch_high,
            CorrectionLevel(settings.mismatch_level) if settings.mismatch_level else None,
        ),
        reference_kl=settings.reference_kl,
        distillation=settings.distillation,
        entropy_bonus=settings.entropy_bonus,
        around_sampler=settings.proximal == "sampler",
        losses=objective_named(settings.objective),
        dual_clip=settings.dual_clip,
        imitates=settings.imitates,
    )  # fmt: skip


def _layout(settings: TrainerSettings, engine: PolicyEngine) -> Layout:
    return Layout(
        packs=engine.ranks.packs,
        budget_tokens=settings.micro_batch_tokens,
        chunk_tokens=settings.chunk_tokens,
        aggregation=Aggregation(settings.aggregation),
        constant_tokens=settings.constant_tokens,
        cost=engine.cost,
        epochs=settings.epochs,
        mini_batches=settings.mini_batches,
        alone=engine.alone,
        share=engine.shares,
    )


def _slots(rows: Sequence[TrainingRow]) -> list[int]:
    """Where each row's trained tokens start among those of the step, and their number last."""
    return [0, *accumulate(row.trained_tokens for row in rows)]


def _positions(indices: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Where the trained tokens of these rows stand among those of the step. int64 [n]."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(slots[i], slots[i + 1]) for i in indices)])


def _picked(values_N: Tensor | None, where: Tensor, like: Tensor) -> Tensor | None:
    return None if values_N is None else values_N[where].to(like.device)


def _packing(work: Work, layout: Layout) -> dict[str, float]:
    """Over all passes: how even the work is among ranks, how full micro-batches are, how many a rank runs, and how often tokens
    that samples share are computed."""
    return {
        "pack/balance": work.balance,
        "pack/fill": work.tokens / (work.micro_batches * layout.packs * layout.budget_tokens),
        "pack/micro_batches": float(work.micro_batches),
        "compute/unique_tokens": float(work.unique_tokens),
        "compute/repeated_tokens": float(work.tokens - work.unique_tokens),
    }


def _booked(
    rows: Sequence[TrainingRow], slots: Sequence[int], taken_out_N: Tensor, poisoned: Collection[int]
) -> Ledger:
    ledger = Ledger()
    for i, row in enumerate(rows):
        if i in poisoned:
            for version, tokens in row.trained_by_version().items():
                ledger.untrained(version, Reason.POISONED, tokens)
            continue
        out_n = taken_out_N[slots[i] : slots[i + 1]]
        version_n = row.version_T[row.loss_mask_T]
        for number, version in enumerate(row.versions):
            here_n = version_n == number
            masked = int((here_n & out_n).sum())
            ledger.trained(version, int(here_n.sum()) - masked)
            ledger.untrained(version, Reason.MISMATCH, masked)
    return ledger


def _peak_tflops(device_name: str) -> float | None:
    words = device_name.replace("-", " ").split()
    return next((value for name, value in PEAK_TFLOPS.items() if name in words), None)
