"""Spare trials: a group begins more trials than it needs, and does not wait for the slowest. Bookkeeping only: `TrialPool` ends
what is not needed."""

from __future__ import annotations

from collections.abc import Iterable

from steno_rollouts.outcome import TrialResult


class SpareTrials:
    """Args: needed: trials of a group with a reward (or that await one, with their group); then the others are over. None: each
    trial runs to its end."""

    def __init__(self, needed: int | None) -> None:
        self.needed = needed
        self._scored: dict[str, set[str]] = {}
        self._open: dict[str, set[str]] = {}
        self._ending: set[str] = set()

    def add(self, group_id: str, trial_ids: Iterable[str]) -> None:
        """A group, and its trials that have not ended."""
        if self.needed is not None and (left := set(trial_ids)):
            self._open[group_id] = left

    def ended(self, result: TrialResult) -> None:
        if self.needed is None:
            return
        if result.reward is not None or result.awaits_reward:
            self._scored.setdefault(result.group_id, set()).add(result.trial_id)
        left = self._open.get(result.group_id, set())
        left.discard(result.trial_id)
        if not left:
            self._open.pop(result.group_id, None)

    def not_needed(self, group_id: str) -> list[str]:
        """The group's trials that have not ended, once enough have a reward; without those that are being ended."""
        if self.needed is None or len(self._scored.get(group_id, ())) < self.needed:
            return []
        return [trial_id for trial_id in self._open.get(group_id, ()) if trial_id not in self._ending]

    def groups(self) -> list[str]:
        """Those with trials that have not ended."""
        return list(self._open)

    def ending(self, trial_id: str) -> None:
        """It is ended as spare, from now on."""
        self._ending.add(trial_id)

    def is_ending(self, trial_id: str) -> bool:
        return trial_id in self._ending
