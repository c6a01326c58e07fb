"""Samples, as the proxy records them, into rows of tensors; what can't be trained is counted by reason in the ledger (I4).

This is the trainer's gate. Each sampled token that a sample brings for the first time leaves here in exactly one of two ways: as
a trainable token of a row, or booked as not trained. Tokens a sample shares with an earlier one of its session are context here;
they are accounted for there.

Shapes: T tokens of one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steno.contracts.records import Sample, SampledRange
from steno.contracts.runs.train_models import asked_for
from steno_trainer.data.ledger import UNKNOWN_VERSION, Ledger, Reason
from steno_trainer.data.overlong import LeaveOut
from steno_trainer.data.staleness import StalenessVerdict, VersionHistory, judge


@dataclass(frozen=True)
class TrainingTerms:
    """What a sample must meet to be trained.

    policy: the one in training. models: calls that are trained, as `train_models` has them. max_staleness_steps: see
    `staleness`; None: samples of any version are trained, as records of other runs are. max_tokens: of one sample; what a
    micro-batch may hold. vocabulary: ids must be below it, and none of `lacking`. imitates: what was sampled is trained as text:
    at temperature 1, without a reward, and whatever its probability was.
    """

    history: VersionHistory
    max_staleness_steps: int | None
    max_tokens: int
    vocabulary: int
    policy: str = "default"
    models: tuple[str, ...] = ()
    imitates: bool = False
    lacking: frozenset[int] = frozenset()

    def trains(self, part: SampledRange) -> bool:
        """Whether this completion is of the policy in training, and of a call that is trained."""
        return part.policy == self.policy and asked_for(part, self.models)


class TurnPlace(NamedTuple):
    """Where a turn's completion stands in a row: positions [start, end)."""

    turn_id: str
    start: int
    end: int


@dataclass(frozen=True)
class TrainingRow:
    """One sample that can be trained.

    token_ids_T int64; loss_mask_T bool, True where a token is trained from this row, never at position 0; sampling_logprobs_T
    float32, finite under the mask, NaN where nothing was sampled; temperatures_T float32, 1.0 where nothing was sampled;
    version_T int64, index into `versions`, -1 where nothing was sampled. completion_starts: positions, ascending; a sampled token
    is of the completion that starts last before it, or there. turns: whose completions these are; known on the first rank only.
    """

    trial_id: str
    group_id: str
    token_ids_T: Tensor
    loss_mask_T: Tensor
    sampling_logprobs_T: Tensor
    temperatures_T: Tensor
    version_T: Tensor
    versions: tuple[str, ...]
    verdict: StalenessVerdict
    completion_starts: tuple[int, ...] = (0,)
    turns: tuple[TurnPlace, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask_T.sum())

    def trained_by_version(self) -> Counter[str]:
        counts = torch.bincount(self.version_T[self.loss_mask_T], minlength=len(self.versions)).tolist()
        return +Counter(dict(zip(self.versions, counts, strict=True)))


def read_samples(
    samples: Iterable[Sample], terms: TrainingTerms, ledger: Ledger, left_out: LeaveOut = lambda sample, part: False
) -> list[TrainingRow]:
    """The rows of the samples that can be trained, in their order. Everything else that they bring is booked as not trained.

    Synthetic, superseded, constrained and overlong tokens and those of other policies and models are booked one by one; the first
    of these reasons books all that is left of a sample: malformed, missing_logprob, unscored, ungrouped, bad_version, orphaned,
    stale, too_long. Not booked here: `sampled`, which comes from the turns (`ledger.received`), and what becomes of the rows.

    Args: left_out: which completions are overlong.
    """
    found = (_read(sample, terms, ledger, left_out) for sample in samples)
    return [row for row in found if row is not None]


def drop_groups(rows: Iterable[TrainingRow], dropped: Mapping[str, Reason], ledger: Ledger) -> list[TrainingRow]:
    """The rows whose group says something; those of dropped groups (`advantages.Advantages.dropped`) are booked."""
    kept = []
    for row in rows:
        reason = dropped.get(row.group_id)
        if reason is None:
            kept.append(row)
        else:
            for version, tokens in row.trained_by_version().items():
                ledger.untrained(version, reason, tokens)
    return kept


def all_trained(token_ids: Sequence[int]) -> TrainingRow:
    """A row of given tokens, to be scored: all but the first, at temperature 1. Its trial is `probe`."""
    length = len(token_ids)
    mask_T = torch.ones(length, dtype=torch.bool)
    mask_T[0] = False
    return TrainingRow(
        trial_id="probe",
        group_id="probe",
        token_ids_T=torch.tensor(list(token_ids), dtype=torch.int64),
        loss_mask_T=mask_T,
        sampling_logprobs_T=torch.zeros(length),
        temperatures_T=torch.ones(length),
        version_T=torch.zeros(length, dtype=torch.int64),
        versions=("probe/0",),
        verdict=StalenessVerdict(None),
    )


def _read(sample: Sample, terms: TrainingTerms, ledger: Ledger, left_out: LeaveOut) -> TrainingRow | None:
    """A row, or None; books what is not trained either way."""
    view = _View.of(sample, terms, left_out)
    if view is None:
        for version, tokens in claimed(sample).items():
            ledger.untrained(version, Reason.MALFORMED, tokens)
        return None
    silent_T = ~view.loss_mask_T & np.isnan(view.logprobs_T)
    left_T = view.own_T
    for reason, where_T in (
        (Reason.SYNTHETIC, silent_T),
        (Reason.SUPERSEDED, view.superseded_T),
        (Reason.OTHER_POLICY, ~view.policy_T),
        (Reason.OTHER_MODEL, ~view.trains_T),
        (Reason.CONSTRAINED, ~view.loss_mask_T),
        (Reason.OVERLONG, view.overlong_T),
    ):
        view.book(left_T & where_T, reason, ledger)
        left_T = left_T & ~where_T
    trained_T = left_T
    if not trained_T.any():
        return None
    verdict = judge(terms.history, view.versions_of(view.policy_T), terms.max_staleness_steps)
    if terms.imitates:
        view = replace(
            view, temperatures_T=np.ones_like(view.temperatures_T), logprobs_T=np.zeros_like(view.logprobs_T)
        )
    refused = _refuse(sample, view, trained_T, verdict, terms)
    if refused is not None:
        view.book(trained_T, refused, ledger)
        return None
    assert sample.group_id is not None  # _refuse has seen to it
    return TrainingRow(
        trial_id=sample.trial_id,
        group_id=sample.group_id,
        token_ids_T=torch.from_numpy(view.token_ids_T),
        loss_mask_T=torch.from_numpy(trained_T),
        sampling_logprobs_T=torch.from_numpy(view.logprobs_T),
        temperatures_T=torch.from_numpy(view.temperatures_T),
        version_T=torch.from_numpy(view.version_T),
        versions=view.versions,
        verdict=verdict,
        completion_starts=tuple(part.start for part in sample.completions),
        turns=tuple(
            TurnPlace(turn_id, part.start, part.end)
            for turn_id, part in zip(sample.turn_ids, sample.completions, strict=True)
        ),
    )


def _refuse(
    sample: Sample, view: _View, trained_T: NDArray[np.bool_], verdict: StalenessVerdict, terms: TrainingTerms
) -> Reason | None:
    if not np.isfinite(view.logprobs_T[trained_T]).all():
        return Reason.MISSING_LOGPROB
    if sample.reward is None and not terms.imitates:
        return Reason.UNSCORED
    if sample.group_id is None:
        return Reason.UNGROUPED
    if verdict.reason is not None:
        return verdict.reason
    return Reason.TOO_LONG if len(view.token_ids_T) > terms.max_tokens else None


@dataclass(frozen=True)
class _View:
    """A well-formed sample as arrays. own_T: sampled, and accounted for in this sample. policy_T: sampled by the policy that is
    in training. trains_T: of these, by calls that are trained."""

    token_ids_T: NDArray[np.int64]
    loss_mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    temperatures_T: NDArray[np.float32]
    version_T: NDArray[np.int64]
    own_T: NDArray[np.bool_]
    policy_T: NDArray[np.bool_]
    trains_T: NDArray[np.bool_]
    superseded_T: NDArray[np.bool_]
    overlong_T: NDArray[np.bool_]
    versions: tuple[str, ...]

    @classmethod
    def of(cls, sample: Sample, terms: TrainingTerms, left_out: LeaveOut) -> _View | None:
        """None: the sample contradicts itself."""
        n = len(sample.loss_mask)
        if len(sample.token_ids) != 4 * n or len(sample.sampling_logprobs) != 4 * n:
            return None
        if len(sample.completions) != len(sample.turn_ids) or not _ordered(sample.completions, n):
            return None
        token_ids_T = np.frombuffer(sample.token_ids, "<i4").astype(np.int64)
        mask_T = np.frombuffer(sample.loss_mask, np.uint8)
        temperatures_T, version_T = np.ones(n, np.float32), np.full(n, -1)
        sampled_T, own_T, policy_T, trains_T, superseded_T, overlong_T = (np.zeros(n, np.bool_) for _ in range(6))
        for part in sample.completions:
            at = slice(part.start, part.end)
            temperatures_T[at], sampled_T[at] = part.temperature, True
            own_T[at], superseded_T[at] = not part.shared, part.superseded
            policy_T[at], trains_T[at] = part.policy == terms.policy, terms.trains(part)
            overlong_T[at] = left_out(sample, part)
        versions: dict[str, int] = {}
        for span in sample.spans:
            at = slice(span.start, span.end)
            if not 0 <= span.start <= span.end <= n or (version_T[at] >= 0).any() or not sampled_T[at].all():
                return None
            version_T[at] = versions.setdefault(span.version, len(versions))
        trained_T = mask_T.astype(np.bool_)
        # The first token has no state before it that could predict it.
        if (
            (mask_T > 1).any()
            or (trained_T & ~own_T).any()
            or (trained_T & (version_T < 0)).any()
            or trained_T[:1].any()
        ):
            return None
        if not ((token_ids_T >= 0) & (token_ids_T < terms.vocabulary)).all() or (temperatures_T[trained_T] <= 0).any():
            return None
        if terms.lacking and not terms.lacking.isdisjoint(token_ids_T.tolist()):
            return None
        logprobs_T = np.frombuffer(sample.sampling_logprobs, "<f4").astype(np.float32)
        return cls(
            token_ids_T, trained_T, logprobs_T, temperatures_T, version_T, own_T, policy_T, trains_T, superseded_T, overlong_T,
            tuple(versions),
        )  # fmt: skip

    def versions_of(self, where_T: NDArray[np.bool_]) -> list[str]:
        return [self.versions[i] for i in np.unique(self.version_T[where_T]) if i >= 0]

    def book(self, where_T: NDArray[np.bool_], reason: Reason, ledger: Ledger) -> None:
        numbers, counts = np.unique(self.version_T[where_T], return_counts=True)
        for i, tokens in zip(numbers.tolist(), counts.tolist(), strict=True):
            ledger.untrained(self.versions[i] if i >= 0 else UNKNOWN_VERSION, reason, tokens)


def _ordered(parts: list[SampledRange], n: int) -> bool:
    edges = [edge for part in parts for edge in (part.start, part.end)]
    return edges == sorted(edges) and (not edges or 0 <= edges[0] <= edges[-1] <= n)


def claimed(sample: Sample) -> Counter[str]:
    """Tokens that a sample says are its own (not shared), by version: the best there is to book for a malformed one. A sample
    without completions is taken to own all its spans."""
    tokens: Counter[str] = Counter()
    if not sample.completions:
        for span in sample.spans:
            tokens[span.version] += max(0, span.end - span.start)
    for part in sample.completions:
        if part.shared:
            continue
        left = max(0, part.end - part.start)
        for span in sample.spans:
            known = min(left, max(0, min(part.end, span.end) - max(part.start, span.start)))
            tokens[span.version] += known
            left -= known
        tokens[UNKNOWN_VERSION] += left
    return +tokens
