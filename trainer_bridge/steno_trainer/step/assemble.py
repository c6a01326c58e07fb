"""Leased groups into one step's batch, and everything that is known of them into numbers. Pure: values in, values out.

Every token of these groups is booked on the way, in the books of the step (I4): what was sampled, from the turns; what can't be
trained, by reason. What is left is what the step trains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from steno.contracts.runs.leases import Lease
from steno_rollouts.reporting.breakdown import bounded, label_of, metric_means
from steno_trainer.data.advantages import AnyEstimator, Estimator, Gdpo, ScoredTrial, fault, why_silent
from steno_trainer.data.lease_feed import LeasedGroup
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.overlong import Overlong, OverlongFiltering, own_completions, was_cut
from steno_trainer.data.rows import TrainingRow, TrainingTerms, read_samples
from steno_trainer.step.step_plan import StepBatch, make_batch


@dataclass(frozen=True)
class AssembledStep:
    """batch: its rows may be none; then there is nothing to train. books: a ledger of this step alone, complete but for what the
    step itself books. values: by names of `metrics`. malformed: group id -> what is wrong with it. named: a call asked for one
    of `terms.models`. other_models: if none did, the names that the policy's calls asked for; none: it was not called, or by no
    name that is on record. lacking: metrics that `Gdpo` takes for rewards, and that no scored trial has; None: no trial is
    scored, or the estimator is not `Gdpo`."""

    batch: StepBatch
    books: Ledger
    values: dict[str, float]
    malformed: dict[str, str] = field(default_factory=dict)
    named: bool = False
    other_models: tuple[str, ...] = ()
    lacking: tuple[str, ...] | None = None

    @property
    def trained_tokens(self) -> int:
        return sum(row.trained_tokens for row in self.batch.rows)


_OF_ADVANTAGES = ("reward/zero_variance_fraction", "advantage/mean", "advantage/abs_mean")


def says_something(lease: Lease, estimator: AnyEstimator = Estimator.GRPO) -> bool:
    """Whether the rewards of a group differ, so that its trials have advantages."""
    name = lease.group.group_id
    scored = [ScoredTrial(t.trial_id, name, t.reward, metrics=t.metrics) for t in lease.trials if t.reward is not None]
    return why_silent(scored, estimator) is None


def assemble(
    groups: Sequence[LeasedGroup],
    terms: TrainingTerms,
    estimator: AnyEstimator | None,
    overlong: Overlong,
    *,
    count_silent: bool = True,
    train_silent: bool = False,
    report_by: str | None = None,
) -> AssembledStep:
    """Everything that these groups bring to a step by weights that `terms.history` ends in. estimator, count_silent and
    train_silent: as in `make_batch`. report_by: field of the tasks by which rewards are reported as well."""
    books = Ledger()
    for leased in groups:
        books.add(leased.books)
    samples = [sample for leased in groups for sample in leased.samples]
    trials = [trial for leased in groups for trial in leased.lease.trials]
    rows = read_samples(samples, terms, books, overlong.left_out(trials, samples, terms.trains))
    completions = own_completions(samples, terms.trains)
    lengths: Counter[str] = Counter()
    for trial_id, part in completions:
        lengths[trial_id] += part.end - part.start
    scored = [
        ScoredTrial(trial.trial_id, leased.group_id, trial.reward, overlong.shaping(tokens), tokens, trial.metrics)
        for leased in groups
        for trial in leased.lease.trials
        if trial.reward is not None
        for tokens in (lengths[trial.trial_id],)
    ]
    batch, dropped = make_batch(rows, scored, estimator, books, count_silent=count_silent, train_silent=train_silent)
    judge = Estimator.GRPO if estimator is None else estimator
    lacking: tuple[str, ...] | None = None
    if isinstance(judge, Gdpo) and scored:
        lacking = tuple(name for name in judge.weights if not any(name in trial.metrics for trial in scored))
    malformed = {trial.group_id: f"trial {trial.trial_id}: {why}" for trial in scored if (why := fault(trial, judge))}
    scored = [trial for trial in scored if trial.group_id not in malformed]
    values = _values(groups, scored, batch, dropped)
    if estimator is None:  # rewards are looked at by nobody
        malformed = {}
        values = {name: value for name, value in values.items() if name not in _OF_ADVANTAGES}
    if completions:
        values["length/truncated_fraction"] = _mean([was_cut(part) for _, part in completions])
    values |= {f"trial/{name}": value for name, value in metric_means(trial.metrics for trial in trials).items()}
    if report_by is not None:
        values |= _by_value(groups, scored, report_by)
    others = own_completions(samples, lambda part: part.policy == terms.policy) if not completions else []
    asked = tuple(sorted({part.model for _, part in others if part.model is not None}))
    values |= _overlong(overlong, scored, books)
    return AssembledStep(batch, books, values, malformed, bool(completions), asked, lacking)


def _values(
    groups: Sequence[LeasedGroup], scored: Sequence[ScoredTrial], batch: StepBatch, dropped: dict[str, Reason]
) -> dict[str, float]:
    rows = batch.rows
    values: dict[str, float] = {
        "batch/groups": len(groups),
        "batch/groups_trained": len({row.group_id for row in rows}),
        "batch/trials": len(scored),
        "batch/samples": len(rows),
        "batch/tokens": sum(row.tokens for row in rows),
        "batch/trained_tokens": sum(row.trained_tokens for row in rows),
    }
    if groups:
        equal = sum(reason is Reason.ZERO_VARIANCE for reason in dropped.values())
        values["reward/zero_variance_fraction"] = equal / len(groups)
    if scored:
        rewards = [trial.reward for trial in scored]
        values |= {"reward/mean": _mean(rewards), "reward/min": min(rewards), "reward/max": max(rewards)}
        values["reward/std"] = math.sqrt(_mean([(reward - values["reward/mean"]) ** 2 for reward in rewards]))
        turns = [trial.counts.turns for leased in groups for trial in leased.lease.trials]
        values["length/turns_mean"] = _mean(turns)
    if rows:
        advantages = [batch.advantages[row.trial_id] for row in rows]
        lengths = [row.tokens for row in rows]
        values |= {
            "advantage/mean": _mean(advantages),
            "advantage/abs_mean": _mean([abs(advantage) for advantage in advantages]),
            "length/sample_mean": _mean(lengths),
            "length/sample_max": max(lengths),
            "length/trained_mean": values["batch/trained_tokens"] / len(rows),
        }
        values |= _staleness(rows)
    return values


def _by_value(groups: Sequence[LeasedGroup], scored: Sequence[ScoredTrial], field: str) -> dict[str, float]:
    """Rewards by what the field of the groups' tasks says, and the fraction of these groups whose rewards are all equal."""
    by_group: dict[str, list[float]] = {}
    for trial in scored:
        by_group.setdefault(trial.group_id, []).append(trial.reward)
    rewards: dict[str, list[float]] = {}
    equal: dict[str, list[float]] = {}
    for leased in groups:
        label, found = label_of(leased.lease.group.task, field), by_group.get(leased.group_id)
        if label is not None and found:
            rewards.setdefault(label, []).extend(found)
            equal.setdefault(label, []).append(len(set(found)) == 1)
    return {f"reward_by/{label}": _mean(values) for label, values in bounded(rewards).items()} | {
        f"zero_variance_by/{label}": _mean(values) for label, values in bounded(equal).items()
    }


def _overlong(overlong: Overlong, scored: Sequence[ScoredTrial], books: Ledger) -> dict[str, float]:
    values: dict[str, float] = {}
    total = books.total()
    if overlong.filtering is not OverlongFiltering.OFF and total.sampled:
        values["overlong/masked_fraction"] = total.untrained.get(Reason.OVERLONG, 0) / total.sampled
    if overlong.max_tokens is not None and scored:
        values["overlong/penalty"] = _mean([-trial.shaping for trial in scored])
    return values


def _staleness(rows: Sequence[TrainingRow]) -> dict[str, float]:
    steps = [row.verdict.staleness_steps for row in rows if row.verdict.staleness_steps is not None]
    if not steps:
        return {}
    return {
        "staleness/mean": _mean(steps),
        "staleness/max": max(steps),
        "staleness/in_flight": _mean([row.verdict.in_flight_steps or 0 for row in rows]),
        "staleness/queue": _mean([row.verdict.queue_steps or 0 for row in rows]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
