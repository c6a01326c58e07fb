"""Chooses one branch of a trial that forked: the one with the most sampled tokens that can be trained. It is trained whole.

In recorded samples, a turn that several samples share is trained by the first of them only, in commit order of their leaves. This
rule does not fit if only one branch is trained: when an agent drops an answer and asks again, the dropped branch owns the
beginning of the trial. So each branch is counted with all of its turns, and the chosen branch owns them.

If no branch can be trained with all of its turns, since a turn that all branches share has no log-probabilities, the recorded
rule is used after all: a branch after the first may still have tokens of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from steno.contracts.records import Sample
from steno_adapters.rows import TrainableRow, trainable_rows


class MainBranch(NamedTuple):
    """row: None: no branch can be trained. untrained: sampled tokens of the trial that are not in the row, by reason, each once:
    those of `trainable_rows`, and `other_branch`. others: branches that could have been trained, and are not."""

    row: TrainableRow | None
    untrained: Counter[str]
    others: int


def main_branch(samples: Sequence[Sample], *, policy: str = "default", models: Sequence[str] = ()) -> MainBranch:
    """Returns: the branch with the most tokens that can be trained; of equal ones, the one whose leaf was committed last.

    Args: samples: all of one trial, in commit order of their leaves. policy, models: as `trainable_rows` has them.
    Raises: ConfigError, as `trainable_rows`.
    """
    masks = _masks(samples)
    tokens = [_trainable_tokens(_owning([sample], masks), policy, models) for sample in samples]
    if any(tokens):
        main = max(range(len(samples)), key=lambda i: (tokens[i], i))
        order = [samples[main], *(sample for i, sample in enumerate(samples) if i != main)]
        rows, untrained = trainable_rows(_owning(order, masks), policy=policy, models=models)
    else:
        rows, untrained = trainable_rows(samples, policy=policy, models=models)
        rows.sort(key=lambda row: row.trained_tokens)
        rows.reverse()  # of equals the last one is the first now
    if not rows:
        return MainBranch(None, untrained, 0)
    row, *others = rows
    untrained["other_branch"] += sum(other.trained_tokens for other in others)
    return MainBranch(row, +untrained, len(others))


def _trainable_tokens(samples: Sequence[Sample], policy: str, models: Sequence[str]) -> int:
    rows, _ = trainable_rows(samples, policy=policy, models=models)
    return sum(row.trained_tokens for row in rows)


def _masks(samples: Sequence[Sample]) -> dict[str, bytes]:
    """Returns: turn id -> the loss mask of its completion, from the first sample that has the turn."""
    return {
        turn_id: sample.loss_mask[part.start : part.end]
        for sample in samples
        for turn_id, part in zip(sample.turn_ids, sample.completions, strict=True)
        if not part.shared
    }


def _owning(samples: Sequence[Sample], masks: dict[str, bytes]) -> list[Sample]:
    """Returns: copies of these samples; a turn that several share is trained in the first of them only, in this order."""
    owned = set[str]()
    found = []
    for sample in samples:
        mask, parts = bytearray(sample.loss_mask), []
        for turn_id, part in zip(sample.turn_ids, sample.completions, strict=True):
            own = turn_id in masks and turn_id not in owned
            mask[part.start : part.end] = masks[turn_id] if own else bytes(part.end - part.start)
            parts.append(part.model_copy(update={"shared": not own}))
            owned.add(turn_id)
        found.append(sample.model_copy(update={"loss_mask": bytes(mask), "completions": parts}))
    return found
