"""Recorded samples as rows of arrays: what of each can be trained, and how many tokens of it can't, by reason. No tokenizer.

A row is one path through a trial's conversation: a trial that forked has several, and each sampled token is trained in one of
them only (`Sample.loss_mask`). Shapes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steno.contracts.records import Sample
from steno.contracts.runs.train_models import asked_for, checked


@dataclass(frozen=True)
class TrainableRow:
    """One sample with at least one token to train.

    prompt_ids: int32 [P], all before the first trained token; at least one. response_ids: int32 [R], from there to the end: what
    the policy said, and between it the results of tools. response_mask: bool [R], True where a token is to be trained from this
    row. logprobs: float32 [R], what each token was sampled at, at its temperature; NaN where nothing was sampled, finite under
    the mask. temperatures: float32 [R], 1.0 where nothing was sampled. version_index: int32 [R], into `versions`, -1 where
    nothing was sampled. reward: the trial's, which all of its rows share.
    """

    trial_id: str
    group_id: str
    leaf_id: str
    reward: float
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    version_index: NDArray[np.int32]
    versions: tuple[str, ...]

    def __len__(self) -> int:
        """Tokens, prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [P + R]"""
        return np.concatenate([self.prompt_ids, self.response_ids])


def trainable_rows(
    samples: Iterable[Sample], *, policy: str = "default", models: Sequence[str] = ()
) -> tuple[list[TrainableRow], Counter[str]]:
    """The rows of these samples, in their order, and the sampled tokens that none of them trains, by reason: `superseded`,
    `other_policy`, `other_model`, `constrained` (not drawn by plain temperature sampling), `missing_logprob`, `ungrouped`,
    `unscored`, `malformed`. What samples share counts once.

    Args: policy: the one in training. models: calls that are trained, as `train_models` has them.
    Raises: ConfigError: `models` is no list of names, or samples do not say what was asked for.
    """
    rows, untrained = [], Counter[str]()
    names = checked(models)
    for sample in samples:
        row = _row(sample, policy, names, untrained)
        if row is not None:
            rows.append(row)
    return rows, +untrained


def _row(sample: Sample, policy: str, models: Sequence[str], untrained: Counter[str]) -> TrainableRow | None:
    ids, mask, logprobs = sample.to_numpy()
    own, superseded, ours, asked = (np.zeros(len(ids), np.bool_) for _ in range(4))
    temperatures = np.ones(len(ids), np.float32)
    for part in sample.completions:
        at = slice(part.start, part.end)
        own[at], superseded[at], ours[at] = not part.shared, part.superseded, part.policy == policy
        temperatures[at], asked[at] = part.temperature, asked_for(part, models)
    left = own.copy()
    for reason, where in (
        ("superseded", superseded), ("other_policy", ~ours), ("other_model", ~asked), ("constrained", ~mask)
    ):  # fmt: skip
        untrained[reason] += int((left & where).sum())
        left &= ~where
    if not left.any():
        return None
    if (refused := _refused(sample, ids, left, logprobs, temperatures)) is not None:
        untrained[refused] += int(left.sum())
        return None
    version_index, versions = _versions(sample, len(ids))
    first = int(left.argmax())
    assert sample.group_id is not None and sample.reward is not None  # _refused has seen to it
    return TrainableRow(
        trial_id=sample.trial_id,
        group_id=sample.group_id,
        leaf_id=sample.leaf_id,
        reward=sample.reward,
        prompt_ids=ids[:first],
        response_ids=ids[first:],
        response_mask=left[first:],
        logprobs=logprobs[first:],
        temperatures=temperatures[first:],
        version_index=version_index[first:],
        versions=versions,
    )


def _refused(
    sample: Sample,
    ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    temperatures: NDArray[np.float32],
) -> str | None:
    if not np.isfinite(logprobs[trained]).all():
        return "missing_logprob"
    if sample.reward is None:
        return "unscored"
    if sample.group_id is None:
        return "ungrouped"
    # The first token has none before it that could predict it.
    return "malformed" if trained[0] or (ids < 0).any() or not (temperatures[trained] > 0).all() else None


def _versions(sample: Sample, length: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    index, versions = np.full(length, -1, np.int32), dict[str, int]()
    for span in sample.spans:
        index[span.start : span.end] = versions.setdefault(span.version, len(versions))
    return index, tuple(versions)
