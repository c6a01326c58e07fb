"""Policy versions, how far behind a sample is, and how many groups may be started so that none comes too late.

A version is `<lineage>/<step>` (I10). Each start of a trainer opens a new lineage and goes on counting steps where the checkpoint
stood, so a version lies in this trainer's past if its lineage does and its step is not after the point where the next
lineage went on. What is past that point was lost in a crash.

    staleness of a sample = steps between the weights about to be updated and the *oldest* version in it
                          = (newest - oldest version in it: grown in flight) + (current - newest: grown in the queue)

For a lost version, steps are counted back over the lost steps, and forward to the current weights. Its samples are trained: each
token has the log-probability that it was sampled at, and the new lineage takes the lost steps again with the same groups in the
same order, since a crash gives groups back in order. Until it has done so, the lost steps make no sample too old (ADR 16).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from steno_trainer.data.ledger import Reason
from steno_trainer.errors import BadBatch

FIRST = "base"
"""The lineage of the weights that a run begins with."""
_VERSION = re.compile(r"([^/]+)/(0|[1-9][0-9]*)")


class PolicyVersion(NamedTuple):
    """step: optimiser steps since the first weights, across lineages."""

    lineage: str
    step: int

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Raises: ValueError: not `<lineage>/<step>`."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a version: must be <lineage>/<step>")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"{self.lineage}/{self.step}"


class VersionLag(NamedTuple):
    """How far a version is from the current weights. steps: optimizer steps between the two. lost: of these, those that a crash
    took back."""

    steps: int
    lost: int = 0


@dataclass(frozen=True)
class VersionHistory:
    """The weights this trainer has been through: its lineages, oldest first, each with its last version that counts.

    A path of `("base", 0), ("a", 40), ("b", 57)` means: trained from base, resumed from a/40, now at b/57.

    parents: lineage -> the version that it resumed from, for lineages that are not in the path, since no checkpoint holds them.
    lost: for each start that pushed weights which no checkpoint holds: the step that this history resumed from instead, and the
    last step that the start pushed.
    """

    path: tuple[PolicyVersion, ...]
    parents: Mapping[str, PolicyVersion] = field(default_factory=dict)
    lost: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        steps = [version.step for version in self.path]
        if not self.path or steps != sorted(steps) or len({v.lineage for v in self.path}) < len(self.path):
            given = ", ".join(map(str, self.path)) or "no version"
            raise BadBatch(
                f"version history: got {given}, must be one version per lineage, the steps in ascending order"
            )

    @property
    def current(self) -> PolicyVersion:
        return self.path[-1]

    def stepped(self) -> VersionHistory:
        """After one more optimiser step."""
        return replace(self, path=(*self.path[:-1], PolicyVersion(self.current.lineage, self.current.step + 1)))

    def resumed(self, lineage: str) -> VersionHistory:
        """A trainer that starts from these weights, as a new lineage. Raises: BadBatch: the lineage is not new."""
        return replace(self, path=(*self.path, PolicyVersion(lineage, self.current.step)))

    def knowing(self, others: Mapping[str, tuple[PolicyVersion, int]]) -> VersionHistory:
        """This history among all starts of its run. Args: others: lineage -> what it went on from, and the last step it
        pushed."""
        in_path = {version.lineage for version in self.path}
        parents = {lineage: parent for lineage, (parent, _) in others.items() if lineage not in in_path}
        known = replace(self, parents=parents)
        lost = []
        for lineage, (_, step) in sorted(others.items()):
            found = known.behind(PolicyVersion(lineage, step))
            if found is not None and found.lost:
                lost.append((self.current.step - found.steps + found.lost, step))
        return replace(known, lost=tuple(lost))

    def numbered(self, step: int) -> int:
        """The step that a version of this step counts as for the bound: that of the weights that would have been served in its
        place without a crash. It differs from `step` only while lost steps are being taken again."""
        return max([step, *(reached for since, reached in self.lost if since <= step)])

    def behind(self, version: PolicyVersion) -> VersionLag | None:
        """How far `version` is from the current weights; None: nothing connects the two."""
        lost = 0
        for _ in range(len(self.parents) + 1):
            first = 0
            for number, last in enumerate(self.path):
                if last.lineage == version.lineage:
                    over = max(0, version.step - last.step)
                    # No step was ever taken under the name of the first weights, nor beyond the current ones.
                    if version.step < first or (over and number in (0, len(self.path) - 1)):
                        return None
                    lost += over
                    return VersionLag(self.current.step - version.step + over + lost, lost)
                first = last.step
            parent = self.parents.get(version.lineage)
            if parent is None or version.step < parent.step:
                return None
            lost += version.step - parent.step
            version = parent
        return None


@dataclass(frozen=True)
class StalenessVerdict:
    """reason: None if the sample may be trained. The steps are None where a version is not in the history."""

    reason: Reason | None
    staleness_steps: int | None = None
    in_flight_steps: int | None = None
    queue_steps: int | None = None


def judge(history: VersionHistory, versions: Iterable[str], max_staleness_steps: int | None) -> StalenessVerdict:
    """Whether a sample that these versions sampled may be trained now. All of them count, trained or only context.

    max_staleness_steps: None: every sample may be trained, and has no staleness: if other weights sampled the records, their
    versions say nothing about this trainer's weights.

    For the bound, a version counts as the step that `VersionHistory.numbered` returns: groups that were admitted before a crash
    count as no older than without it, although older weights sample them while lost steps are taken again. So a trained sample is
    at most max_staleness_steps plus twice the lost steps behind.

    Raises: BadBatch: no version at all.
    """
    if max_staleness_steps is None:
        return StalenessVerdict(None)
    behind, too_old = [], False
    for text in versions:
        try:
            version = PolicyVersion.parse(text)
        except ValueError:
            return StalenessVerdict(Reason.BAD_VERSION)
        found = history.behind(version)
        if found is None:
            ahead = version.lineage == history.current.lineage and version.step > history.current.step
            return StalenessVerdict(Reason.BAD_VERSION if ahead else Reason.ORPHANED)
        behind.append(found.steps)
        too_old |= history.current.step - history.numbered(version.step) > max_staleness_steps
    if not behind:
        raise BadBatch("a sample has no version, so its staleness is unknown")
    oldest, newest = max(behind), min(behind)
    reason = Reason.STALE if too_old else None
    return StalenessVerdict(reason, staleness_steps=oldest, in_flight_steps=oldest - newest, queue_steps=newest)
