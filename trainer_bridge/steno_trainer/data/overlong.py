"""Completions that ended before the policy ended them: what of them is left out of the loss, and what length costs a trial. Pure.

Where an answer was cut says nothing about what the policy meant, and the reward of what was cut is noise.

    overlong filtering, soft overlong punishment   DAPO, arXiv:2503.14476, 3.4
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from steno.contracts.records import Sample, SampledRange, Session

Trains = Callable[[SampledRange], bool]
"""Whether a completion is of the policy in training and of a call that is trained (`TrainingTerms.trains`)."""
LeaveOut = Callable[[Sample, SampledRange], bool]
"""Whether a completion of a sample is left out of the loss."""


class OverlongFiltering(StrEnum):
    """What is left out of the loss. Rewards count for their group's mean all the same.

    OFF         nothing
    COMPLETION  completions that were cut: by their length limit, or `partial` for whatever reason
    TRIAL       these, and all completions of a trial that was ended by one of its limits, or in which a path ends at a
                length limit: its reward is then for something that was cut. Other trainers filter trajectories like this
    """

    OFF = "off"
    COMPLETION = "completion"
    TRIAL = "trial"


@dataclass(frozen=True)
class Overlong:
    """max_tokens: sampled tokens of a trial at which its punishment is whole (L_max); None: there is none. buffer_tokens: the
    last of these, over which it grows from 0 (L_cache). penalty_factor: in reward units, the whole punishment."""

    filtering: OverlongFiltering = OverlongFiltering.OFF
    max_tokens: int | None = None
    buffer_tokens: int = 1
    penalty_factor: float = 1.0

    def left_out(self, trials: Iterable[Session], samples: Iterable[Sample], trains: Trains) -> LeaveOut:
        """Returns: which completions are left out. Args: trials, samples: all those of the step."""
        if self.filtering is OverlongFiltering.OFF:
            return lambda sample, part: False
        if self.filtering is OverlongFiltering.COMPLETION:
            return lambda sample, part: was_cut(part)
        whole = {trial.trial_id for trial in trials if (trial.end_reason or "").startswith("limit:")}
        for sample in samples:
            if sample.completions and trains(sample.completions[-1]) and _at_its_limit(sample.completions[-1]):
                whole.add(sample.trial_id)
        return lambda sample, part: was_cut(part) or sample.trial_id in whole

    def shaping(self, tokens: int) -> float:
        """What is added to the reward of a trial of so many sampled tokens: 0 up to max_tokens - buffer_tokens, from there
        linearly down to -penalty_factor at max_tokens, and no further. DAPO, equation 13."""
        if self.max_tokens is None:
            return 0.0
        exceeded = (tokens - self.max_tokens + self.buffer_tokens) / self.buffer_tokens
        return -self.penalty_factor * min(1.0, max(0.0, exceeded))


def was_cut(part: SampledRange) -> bool:
    """Whether something else than the policy ended this completion."""
    return part.partial or _at_its_limit(part)


def own_completions(samples: Iterable[Sample], trains: Trains) -> list[tuple[str, SampledRange]]:
    """(trial id, completion) for each completion that is trained, once if samples share it; superseded ones are left out."""
    return [
        (sample.trial_id, part)
        for sample in samples
        for part in sample.completions
        if part.end > part.start and trains(part) and not part.shared and not part.superseded
    ]


def _at_its_limit(part: SampledRange) -> bool:
    return part.finish_reason == "length"
