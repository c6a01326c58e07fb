"""Why the last failed trials failed, for the error of a caller that gives up: an `Observer` of `steno_rollouts`."""

from __future__ import annotations

from collections import deque

from steno.contracts.rest import GroupTrials
from steno_rollouts.outcome import TrialResult
from steno_rollouts.trials.runner import FailedTrial

MOST = 3


class LastFailures:
    """said: a line for each of the last failed trials, the newest last."""

    def __init__(self) -> None:
        self.said: deque[str] = deque(maxlen=MOST)

    def group_started(self, group: GroupTrials) -> None:
        """Nothing has failed yet."""

    def trial_started(self, trial_id: str) -> None:
        """Nothing has failed yet."""

    def trial_waits(self, result: TrialResult) -> None:
        """It has not failed yet."""

    def trial_ended(self, result: TrialResult) -> None:
        if result.failed and not result.earlier:
            self.said.append(f"trial {result.trial_id}: {result.end_reason}: {result.detail or 'no more is known'}")

    def trial_failed(self, failed: FailedTrial) -> None:
        """It may be run again; `trial_ended` follows if not."""

    def held_back(self, why: str | None) -> None:
        """Nothing has failed."""
