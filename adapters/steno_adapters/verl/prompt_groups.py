"""verl's groups at the proxy: the sessions of one prompt are the trials of one group.

verl starts all sessions of a prompt in one process, one right after the other, and tells none of them how many there are. So each
calls `come` before it waits for anything, and the group is registered once the first of them may run, for those that have come by
then. One that comes later gets a group of its own, under the same uid.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steno.contracts.records import Limits, SamplingPolicy
from steno.contracts.rest import GroupSpec, GroupTrials
from steno_rollouts.tasks.task import Task

VERL = "verl"
"""The field of a group's task that says which prompt of verl's it is: {"uid": …, "step": …, "lineage": …}."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class PromptGroup:
    """Sessions that have come together. came: how many; open: those that have not left; with_rows: of those that have.
    ended: numbers of those whose trial has ended."""

    def __init__(self) -> None:
        self.came = self.open = self.with_rows = 0
        self.ended: set[int] = set()
        self._registered: asyncio.Future[GroupTrials] | None = None

    @property
    def closed(self) -> bool:
        """Whether the group takes no more sessions: it is registered, with its size."""
        return self._registered is not None

    @property
    def is_registered(self) -> bool:
        made = self._registered
        return made is not None and made.done() and not made.cancelled() and made.exception() is None

    def not_ended(self) -> list[str]:
        """Registered trials that no session has ended: it failed before it could play its trial."""
        if not self.is_registered:
            return []
        assert self._registered is not None
        trials = self._registered.result().trials
        return [trial.session.trial_id for i, trial in enumerate(trials) if i not in self.ended]

    async def registered(self, register: Callable[[int], Awaitable[GroupTrials]]) -> GroupTrials:
        """Registered by the first that asks, for `came` sessions. Raises: what `register` raises, for all of them."""
        if self._registered is None:
            self._registered = asyncio.ensure_future(register(self.came))
        return await asyncio.shield(self._registered)


class PromptGroups:
    """Of one process."""

    def __init__(self) -> None:
        self._newest: dict[str, PromptGroup] = {}
        self._open = 0

    @property
    def open(self) -> int:
        """Sessions of all groups that have not left."""
        return self._open

    def come(self, uid: str) -> tuple[PromptGroup, int]:
        """A session of this prompt has begun. Returns: its group, and its number there."""
        group = self._newest.get(uid)
        if group is None or group.closed:
            group = self._newest[uid] = PromptGroup()
        group.came += 1
        group.open += 1
        self._open += 1
        return group, group.came - 1

    def leave(self, uid: str, group: PromptGroup, *, rows: bool) -> bool:
        """A session has ended. Args: rows: it has some. Returns: True for the last session of a group without any row."""
        group.open -= 1
        self._open -= 1
        group.with_rows += rows
        if group.open:
            return False
        if self._newest.get(uid) is group:
            del self._newest[uid]
        return not group.with_rows


@dataclass(frozen=True)
class PromptSession:
    """One session. uid: of its prompt. law: fields of the sampling law that are forced. step: the trainer's, when it asked.
    waiting: sessions of this process that had not ended when it came, itself and its siblings among them."""

    uid: str
    group: PromptGroup
    index: int
    task: Task
    law: Mapping[str, Any]
    validate: bool
    step: int | None = None
    waiting: int = 1

    def group_spec(self, run: str, lineage: str, size: int, limits: Limits, deadline_s: float) -> GroupSpec:
        """The spec of the session's group, the same from each sibling but for the group id. The id is new at each call: verl asks
        for a prompt again after a restart."""
        return GroupSpec(
            group_id=f"{_slug(run, 48)}.{_slug(self.uid, 48)}.{uuid.uuid4().hex[:8]}",
            run_id=run,
            task={**self.task.fields, VERL: {"uid": self.uid, "step": self.step, "lineage": lineage}},
            size=size,
            deadline_s=deadline_s,
            purpose="eval" if self.validate else "train",
            sampling=SamplingPolicy(force=dict(self.law)),
            limits=limits,
        )


def _slug(text: str, longest: int) -> str:
    return _UNSAFE.sub("-", text)[:longest].strip("-") or "x"
