"""What was recorded of a session, as the rows that verl takes: prompt, response, mask, log-probabilities. Pure; no verl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steno.contracts.records import Sample
from steno_adapters.main_branch import main_branch
from steno_adapters.rows import TrainableRow, trainable_rows


@dataclass(frozen=True)
class SessionRow:
    """One row. prompt_ids: the tokens before the first trained one, at most `prompt_length`; what is left of these tokens stands
    at the beginning of response_ids, masked. response_ids: up to the last trained token. mask: 1 where the policy sampled, and
    the token is trained from this row. logprobs: 0.0 where the mask is 0. steps: the oldest and the newest step whose weights
    sampled a trained token; None: not known."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    steps: tuple[int | None, int | None] = (None, None)

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True)
class SessionRows:
    """rows: of a session, the last with the most trained tokens, since verl reads the session's score and its advantage there.
    untrained: sampled tokens that no row trains, by reason: those of `trainable_rows`, `other_branch`, `orphaned`, `too_long`."""

    rows: list[SessionRow]
    untrained: Counter[str] = field(default_factory=Counter)


def training_rows(
    samples: Sequence[Sample],
    *,
    lineage: str,
    prompt_length: int,
    response_length: int,
    main_only: bool = False,
    models: Sequence[str] = (),
) -> SessionRows:
    """
    Args:
        lineage: of this start. What another one's weights sampled is masked, and counted as `orphaned`.
        prompt_length, response_length: verl's; a response's rest beyond `response_length` is cut off, and counted as `too_long`.
        main_only: of a trial that forked one branch is trained, whole.
        models: as `trainable_rows` has them.
    """
    if main_only:
        main = main_branch(samples, models=models)
        found, untrained = [row for row in (main.row,) if row is not None], main.untrained
    else:
        found, untrained = trainable_rows(samples, models=models)
    rows = []
    for row in found:
        ours, steps = _ours(row, lineage)
        cut = _trainable(row, ours, steps, prompt_length, response_length)
        untrained["orphaned"] += row.trained_tokens - int(ours.sum())
        untrained["too_long"] += int(ours.sum()) - cut.trained_tokens
        if cut.trained_tokens:
            rows.append(cut)
    rows.sort(key=lambda row: row.trained_tokens)
    return SessionRows(rows, +untrained)


def validation_rows(samples: Iterable[Sample], *, prompt_length: int, response_length: int) -> SessionRows:
    """At most one row: the branch with the most sampled tokens within the lengths, whatever law they were sampled by."""
    longest: SessionRow | None = None
    for sample in samples:
        ids, _, logprobs = sample.to_numpy()
        own = np.zeros(len(ids), np.bool_)
        for part in sample.completions:
            own[part.start : part.end] = True
        if not own.any():
            continue
        row = _cut(ids, own, logprobs, prompt_length, response_length)
        if longest is None or row.trained_tokens > longest.trained_tokens:
            longest = row
    return SessionRows([longest] if longest is not None else [])


def _ours(row: TrainableRow, lineage: str) -> tuple[NDArray[np.bool_], list[int | None]]:
    """Returns: the mask of the response's trained tokens that this start's versions sampled; the step of each version."""
    steps = [step_of(version, lineage) for version in row.versions]
    ours = np.array([step is not None for step in steps], np.bool_)
    return row.response_mask & ours[row.version_index], steps


def _trainable(
    row: TrainableRow, ours: NDArray[np.bool_], steps: list[int | None], prompt_length: int, response_length: int
) -> SessionRow:
    before = len(row.prompt_ids)
    mask = np.concatenate([np.zeros(before, np.bool_), ours])
    logprobs = np.concatenate([np.zeros(before, np.float32), row.logprobs])
    cut = _cut(row.token_ids, mask, logprobs, prompt_length, response_length)
    trained = len(cut.prompt_ids) - before + np.flatnonzero(cut.mask)
    known = [step for index in {*row.version_index[trained].tolist()} if (step := steps[index]) is not None]
    return SessionRow(
        cut.prompt_ids, cut.response_ids, cut.mask, cut.logprobs, (min(known), max(known)) if known else (None, None)
    )


def _cut(
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    prompt_length: int,
    response_length: int,
) -> SessionRow:
    first = min(int(mask.argmax()), prompt_length)
    end = min(len(ids), first + response_length)
    kept = mask[first:end]
    if kept.any():
        # verl puts the reward at the last token of the response, and its GAE skips what is masked.
        end -= int(kept[::-1].argmax())
        kept = mask[first:end]
    return SessionRow(
        prompt_ids=ids[:first].tolist(),
        response_ids=ids[first:end].tolist(),
        mask=kept.astype(np.int64).tolist(),
        logprobs=np.where(kept, logprobs[first:end], np.float32(0)).tolist(),
    )


def step_of(version: str, lineage: str) -> int | None:
    """`lineage/step` -> step. None: a version of another start, or of something else."""
    start, _, step = version.rpartition("/")
    return int(step) if start == lineage and step.isdecimal() else None
