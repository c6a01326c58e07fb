"""Spare trials: a group begins more trials than it needs, and does not wait for the slowest. Bookkeeping only: `TrialPool` does
what is said here.

Each launcher stops what it runs itself, as soon as it knows that enough trials of the group have a reward; and whoever claims a
trial of such a group ends it unbegun. Nobody ends what another launcher runs.
"""

from __future__ import annotations

import asyncio

from steno_rollouts.outcome import TrialResult


class SpareTrials:
    """Args: needed: once so many trials of a group have a reward (or await one, with their group), its others are not needed.
    None: each trial runs to its end."""

    def __init__(self, needed: int | None) -> None:
        self.needed = needed
        self._scored: dict[str, set[str]] = {}
        self._running: dict[str, dict[str, asyncio.Event]] = {}

    def begun(self, group_id: str, trial_id: str) -> asyncio.Event | None:
        """Note that a trial runs here. Returns: an event that is set once the trial is not needed; None: it runs to its end."""
        if self.needed is None:
            return None
        not_needed = self._running.setdefault(group_id, {}).setdefault(trial_id, asyncio.Event())
        if self.enough(group_id):
            not_needed.set()
        return not_needed

    def over(self, group_id: str, trial_id: str) -> None:
        """It runs here no more."""
        running = self._running.get(group_id, {})
        running.pop(trial_id, None)
        if not running:
            self._running.pop(group_id, None)

    def ended(self, result: TrialResult) -> None:
        """A trial has ended, here or elsewhere. Those of its group that run here are told to stop, once enough have."""
        if self.needed is None or (result.reward is None and not result.awaits_reward):
            return
        self._scored.setdefault(result.group_id, set()).add(result.trial_id)
        if self.enough(result.group_id):
            for not_needed in self._running.get(result.group_id, {}).values():
                not_needed.set()

    def enough(self, group_id: str) -> bool:
        return self.needed is not None and len(self._scored.get(group_id, ())) >= self.needed

    @property
    def groups(self) -> set[str]:
        """Groups with trials that run here and may have to stop."""
        return {group_id for group_id in self._running if not self.enough(group_id)}
