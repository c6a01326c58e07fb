"""Of a trial that forked, one branch: the one with the most sampled tokens that can be trained. It is trained whole.

Samples say of each turn which of them trains it: the first that has it, in commit order of their leaves. Where one branch alone
is trained that is the wrong one to ask, since an agent that dropped an answer and asked again has left the beginning of its
trial to the branch that it dropped. So each branch is counted with all of its turns, and the one that is taken owns them.

Where no branch can be trained with all of its turns, since one that all of them have has no log-probabilities, what samples say
is asked after all: there a branch after the first may have tokens of its own.
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
    """Of several that have equally many tokens, the one that was gone on with last.

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
    """Turn -> what of its completion can be trained, as the sample says that has it first."""
    return {
        turn_id: sample.loss_mask[part.start : part.end]
        for sample in samples
        for turn_id, part in zip(sample.turn_ids, sample.completions, strict=True)
        if not part.shared
    }


def _owning(samples: Sequence[Sample], masks: dict[str, bytes]) -> list[Sample]:
    """These samples, where what several have is trained in the first of them in this order."""
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
