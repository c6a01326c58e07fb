"""Rows on their way to TRL's trainer: its queue, of which rows that can't be trained by then never come out."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from steno_adapters.rows import TrainableRow


class QueuedRow(NamedTuple):
    group_id: str
    row: TrainableRow
    sample: RolloutSample


class FreshRows(queue.Queue[Any]):
    """Gives TRL no row that TRL would drop as too old, since TRL does not say whose rows it drops.

    Args: take: what becomes of a row whose turn has come; None: it is dropped.
    """

    def __init__(self, take: Callable[[QueuedRow], RolloutSample | None]) -> None:
        super().__init__()
        self._take = take

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            sample = self._take(super().get(block, left))
            if sample is not None:
                return sample
            if until is not None and time.monotonic() >= until:
                raise queue.Empty  # so that the trainer looks whether its worker is well


def rollout_sample(row: TrainableRow, advantage: float, group: int, metrics: dict[str, float]) -> RolloutSample:
    before = len(row.prompt_ids)
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=row.token_ids.astype(np.int64),
        completion_mask=np.concatenate([np.zeros(before, np.int64), row.response_mask.astype(np.int64)]),
        # TRL reads these under the mask alone.
        old_log_probs=np.concatenate(
            [np.zeros(before, np.float32), np.where(row.response_mask, row.logprobs, np.float32(0))]
        ),
        advantage=advantage,
        model_version=0,  # said when its turn comes
        group_id=group,
        metrics=metrics,
        enqueued_at=time.time(),
    )
