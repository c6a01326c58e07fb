"""Policy versions, how far behind a sample is, and how many groups may be started so that none comes too late.

A version is `<lineage>/<step>` (I10). Each start of a trainer opens a new lineage and goes on counting steps where the checkpoint
stood, so a version lies in this trainer's past if its lineage does and its step is not after the point where the next
lineage went on. What is past that point was lost in a crash: an orphan.

    staleness of a sample = step of the weights about to be updated - step of the *oldest* version in it
                          = (newest - oldest version in it: grown in flight) + (current - newest: grown in the queue)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainer_bridge.errors import BadBatch
from trainer_bridge.ledger import Reason

_VERSION = re.compile(r"([^/]+)/(0|[1-9][0-9]*)")


class Version(NamedTuple):
    """steps: optimiser steps since the first weights, across lineages."""

    lineage: str
    step: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises: ValueError: not `<lineage>/<step>`."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no version: <lineage>/<step> is expected")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"{self.lineage}/{self.step}"


@dataclass(frozen=True)
class History:
    """The weights this trainer has been through: its lineages, oldest first, each with its last version that counts.

    `History((Version("base", 0), Version("a", 40), Version("b", 57)))`: trained from base, resumed from a/40, now at b/57.
    """

    path: tuple[Version, ...]

    def __post_init__(self) -> None:
        steps = [version.step for version in self.path]
        if not self.path or steps != sorted(steps) or len({v.lineage for v in self.path}) < len(self.path):
            raise BadBatch(f"no history of a trainer: {', '.join(map(str, self.path)) or 'empty'}")

    @property
    def current(self) -> Version:
        return self.path[-1]

    def stepped(self) -> History:
        """After one more optimiser step."""
        return History((*self.path[:-1], Version(self.current.lineage, self.current.step + 1)))

    def resumed(self, lineage: str) -> History:
        """A trainer that starts from these weights, as a new lineage. Raises: BadBatch: the lineage is not new."""
        return History((*self.path, Version(lineage, self.current.step)))

    def staleness_steps(self, version: Version) -> int | None:
        """Steps from `version` to the current weights; None where it is not in this history."""
        first = 0
        for last in self.path:
            if last.lineage == version.lineage:
                return self.current.step - version.step if first <= version.step <= last.step else None
            first = last.step
        return None


@dataclass(frozen=True)
class Verdict:
    """reason: None if the sample may be trained. The steps are None where a version is not in the history."""

    reason: Reason | None
    staleness_steps: int | None = None
    in_flight_steps: int | None = None
    queue_steps: int | None = None


def judge(history: History, versions: Iterable[str], max_staleness_steps: int) -> Verdict:
    """Whether a sample that these versions sampled may be trained now. All of them count, trained or only context.

    Raises: BadBatch: no version at all.
    """
    behind = []
    for text in versions:
        try:
            version = Version.parse(text)
        except ValueError:
            return Verdict(Reason.BAD_VERSION)
        steps = history.staleness_steps(version)
        if steps is None:
            ahead = version.lineage == history.current.lineage and version.step > history.current.step
            return Verdict(Reason.BAD_VERSION if ahead else Reason.ORPHANED)
        behind.append(steps)
    if not behind:
        raise BadBatch("a sample without a version can't be judged")
    oldest, newest = max(behind), min(behind)
    reason = Reason.STALE if oldest > max_staleness_steps else None
    return Verdict(reason, staleness_steps=oldest, in_flight_steps=oldest - newest, queue_steps=newest)


def admissible_groups(*, in_hand: int, groups_per_step: int, max_staleness_steps: int) -> int:
    """How many groups may be started now, so that none is stale when its turn comes.

    A group that the weights of step i begin to sample behind `in_hand` others is trained at step
    i + floor(in_hand / groups_per_step), if groups are taken in the order they were started. That must not exceed the bound, so
    at most groups_per_step x (max_staleness_steps + 1) groups are in hand at any time; a bound of 0 is training on-policy.

    Args: in_hand: groups started and neither given up nor trained into weights that are served: running, waiting to be trained,
        or trained by a step whose weights are still on their way.
    Source: AReaL's staleness-aware training, arXiv:2505.24298: floor((started - 1) / groups_per_step) <= i + bound.
    """
    return max(0, groups_per_step * (max_staleness_steps + 1) - in_hand)
