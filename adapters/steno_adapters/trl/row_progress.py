"""Which rows a trainer has trained, from nothing but how many: rows are trained in the order in which they were handed over.

A group is finished once all of its rows were trained or dropped; one in the middle is remembered by how many of its rows were.
Both go into the trainer's checkpoint, so that a group that is served again after a crash is trained from where the checkpoint is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_DONE = 10_000
"""Groups that are remembered after the proxy has confirmed that it is done with them."""


@dataclass
class RowProgress:
    """finished: groups that are not acknowledged yet. passed: unfinished group -> how many of its rows were trained or dropped.
    begun: unfinished groups of which a row was trained. groups: how many groups of which a row was trained have finished, in all
    starts of the run. done: the newest acknowledged groups -> when each was made; the proxy's Redis may lose acknowledgements."""

    finished: list[str] = field(default_factory=list)
    passed: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    groups: int = 0
    done: dict[str, float] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)
    _order: deque[tuple[str, bool]] = field(default_factory=deque)

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> RowProgress:
        """Reads what `saved` gave; earlier releases have no `groups` or no `done`. The checkpoint's JSON is sorted by
        name, so `done` is sorted by time again."""
        begun, groups = set(saved.get("begun", [])), int(saved.get("groups", 0))
        done = dict(sorted(saved.get("done", {}).items(), key=lambda one: one[1]))
        return cls(list(saved.get("finished", [])), dict(saved.get("passed", {})), begun, groups, done)

    def saved(self) -> dict[str, Any]:
        return {
            "finished": list(self.finished), "passed": dict(self.passed), "begun": sorted(self.begun), "groups": self.groups,
            "done": dict(self.done),
        }  # fmt: skip

    def begin(self, group_id: str, rows: int, made_at: float) -> int:
        """A group has come with so many rows. Returns: how many of them, from the first on, a checkpoint has already.

        Args: made_at: Unix seconds: one that was made anew under the name of one that is done is another one.
        """
        if self.done.get(group_id) == made_at:
            del self.done[group_id]
            self.finished.append(group_id)
        if group_id in self.finished:
            return rows
        already = min(self.passed.get(group_id, 0), rows)
        self._left[group_id] = self._waiting[group_id] = rows - already
        if not self._left[group_id]:
            self._finish(group_id)
        return already

    def handed_over(self, group_id: str, *, dropped: bool = False) -> bool:
        """The trainer has taken a row, or it was dropped in its turn. Returns: whether it was the group's last one."""
        self._order.append((group_id, dropped))
        self._waiting[group_id] -= 1
        return not self._waiting[group_id]

    def taken(self, group_id: str) -> bool:
        """Whether each row of a group that has come was handed over."""
        return not self._waiting.get(group_id)

    def trained(self, rows: int) -> None:
        """The next `rows` rows were trained."""
        while self._order and (rows or self._order[0][1]):
            group_id, dropped = self._order.popleft()
            if not dropped:
                rows -= 1
                self.begun.add(group_id)
            self.passed[group_id] = self.passed.get(group_id, 0) + 1
            self._left[group_id] -= 1
            if not self._left[group_id]:
                self._finish(group_id)

    def acknowledged(self, group_id: str, made_at: float) -> None:
        self.finished.remove(group_id)
        self.done.pop(group_id, None)  # it is the newest now
        self.done[group_id] = made_at
        while len(self.done) > MOST_DONE:
            del self.done[next(iter(self.done))]

    def _finish(self, group_id: str) -> None:
        self.finished.append(group_id)
        self.groups += group_id in self.begun
        self.begun.discard(group_id)
        self.passed.pop(group_id, None)
        del self._left[group_id], self._waiting[group_id]
