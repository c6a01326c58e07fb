"""Which sessions are exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from steno.client.client import Client
from steno.contracts.records import Session


@dataclass(frozen=True)
class Selection:
    """A session is exported if it matches all that is set.

    min_reward: sessions without a reward do not match. best_of_group: of each group's matching sessions only the one with the
        highest reward, of equal ones the oldest; sessions without a group or a reward do not match.
    """

    status: str | None = None
    group_id: str | None = None
    run_id: str | None = None
    end_reason: str | None = None
    min_reward: float | None = None
    best_of_group: bool = False

    def trial_ids(self, client: Client) -> list[str]:
        """Oldest first. Only ids are kept in memory."""
        if not self.best_of_group:
            return [session.trial_id for session in self._matching(client)]
        best: dict[tuple[str | None, str], tuple[float, str]] = {}
        for session in self._matching(client):
            if session.group_id is None or session.reward is None:
                continue
            group = session.run_id, session.group_id
            if group not in best or session.reward > best[group][0]:
                best[group] = session.reward, session.trial_id
        return [trial_id for _, trial_id in best.values()]

    def _matching(self, client: Client) -> Iterator[Session]:
        for session in client.sessions(status=self.status, group_id=self.group_id, run_id=self.run_id, limit=1000):
            if self.end_reason is not None and session.end_reason != self.end_reason:
                continue
            if self.min_reward is not None and (session.reward is None or session.reward < self.min_reward):
                continue
            yield session
