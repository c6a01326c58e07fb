"""A run's steps on their way to the proxy, where people look at them: numbers, and what the trainer saw in each token.

Posted in the background, in order, after the step: no step waits for it, and none is lost because of it. What can't be posted is
counted (`report/unposted`) and warned of once, until a post is taken again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from steno.contracts.runs.training_steps import AnnotationsKept, PostedAnnotation, TrainingStep
from steno_trainer.data.rows import TrainingRow

logger = logging.getLogger(__name__)

MOST_WAITING = 16
"""Steps that wait to be posted; of more, the oldest are given up. Their rows are in memory until then."""
TOKENS_AT_ONCE = 100_000
TURNS_AT_ONCE = 512
"""In one post of annotations: a fraction of what a proxy takes, read in a few milliseconds."""

Annotations = Callable[[], list[PostedAnnotation]]
"""Made when their turn comes, in a thread."""


class StepTaker(Protocol):
    def post_step(self, run_id: str, step: TrainingStep) -> Awaitable[TrainingStep]: ...
    def annotate(self, run_id: str, items: Sequence[PostedAnnotation]) -> Awaitable[AnnotationsKept]: ...


class _Waiting(NamedTuple):
    step: TrainingStep
    annotations: Annotations | None


class StepPosts:
    """Args: client: of the proxy."""

    def __init__(self, client: StepTaker, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._waiting: deque[_Waiting] = deque()
        self._posting: asyncio.Task[None] | None = None
        self._warned = False
        self.unposted = 0
        """Steps that the proxy did not take, or not whole."""

    def post(self, step: TrainingStep, annotations: Annotations | None = None) -> None:
        """Returns at once."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.unposted += 1
        self._waiting.append(_Waiting(step, annotations))
        if self._posting is None or self._posting.done():
            self._posting = asyncio.create_task(self._post_all())

    async def close(self, wait_s: float) -> None:
        """Once what waits is posted, or after `wait_s`."""
        if self._posting is not None:
            await asyncio.wait({self._posting}, timeout=wait_s)
            if not self._posting.done():
                self._posting.cancel()
                await asyncio.wait({self._posting})
                logger.warning("the last steps are not shown by the proxy: it does not answer, and this trainer ends")

    async def _post_all(self) -> None:
        while self._waiting:
            one = self._waiting.popleft()
            try:
                await self._client.post_step(self._run_id, one.step)
                for some in _in_parts(await asyncio.to_thread(one.annotations) if one.annotations else []):
                    await self._client.annotate(self._run_id, some)
            except Exception as error:  # recorded: numbers that were not shown are no reason to lose a step
                self.unposted += 1
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "the proxy did not take the numbers of step %d (training goes on): %s", one.step.step, error
                    )
            else:
                self._warned = False


def annotations_of(
    rows: Sequence[TrainingRow], differences_N: Tensor, advantages: Mapping[str, float], *, step: int, version: str
) -> list[PostedAnnotation]:
    """Of each turn that has a trained token in these rows. differences_N: of their trained tokens, in their order."""
    found, at = [], 0
    all_N = differences_N.numpy().astype(np.float16)
    for row in rows:
        mask_T = row.loss_mask_T.numpy()
        values_T = np.full(row.tokens, np.nan, np.float16)
        values_T[mask_T] = all_N[at : at + row.trained_tokens]
        at += row.trained_tokens
        for turn_id, start, end in row.turns:
            if mask_T[start:end].any():
                found.append(
                    PostedAnnotation(
                        trial_id=row.trial_id, turn_id=turn_id, step=step, version=version,
                        advantage=advantages.get(row.trial_id), differences=values_T[start:end].astype("<f2").tobytes(),
                    )
                )  # fmt: skip
    return found


def _in_parts(items: Sequence[PostedAnnotation]) -> Iterator[list[PostedAnnotation]]:
    part: list[PostedAnnotation] = []
    tokens = 0
    for item in items:
        if part and (len(part) >= TURNS_AT_ONCE or tokens + len(item.differences) // 2 > TOKENS_AT_ONCE):
            yield part
            part, tokens = [], 0
        part.append(item)
        tokens += len(item.differences) // 2
    if part:
        yield part
