"""Policy versions of the record as TRL counts them: one number, which goes up by one with each push of this start.

A version is `<lineage>/<step>`: each start of a trainer opens a lineage, and goes on counting steps where its checkpoint stood.
If a later start went on from an earlier step than a version's, that version was lost in a crash. It is as far behind as the
steps from it back to that earlier step, plus the steps from there forward to the beginning of this start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steno.contracts.errors import BadRequest
from steno_adapters.weights import parse_version


@dataclass
class VersionCount:
    """starts: (lineage, step it went on from), oldest first; the last is this one. every: optimizer steps between two pushes."""

    starts: list[tuple[str, int]]
    every: int = 1
    pushed: dict[int, int] = field(default_factory=dict)

    @property
    def lineage(self) -> str:
        return self.starts[-1][0]

    @property
    def began_at(self) -> int:
        return self.starts[-1][1]

    def push(self, step: int) -> str:
        """The next push's version. TRL counts it by one more than the last."""
        self.pushed[step] = len(self.pushed) + 1
        return f"{self.lineage}/{step}"

    @property
    def parent(self) -> str | None:
        """What this lineage went on from."""
        return f"{self.starts[-2][0]}/{self.began_at}" if len(self.starts) > 1 else None

    def number(self, version: str) -> int | None:
        """TRL's `model_version` of what this version sampled, 0 and less for earlier starts; None: nothing connects the two."""
        try:
            lineage, step = parse_version(version)
        except BadRequest:
            return None
        if lineage == self.lineage:
            return self.pushed.get(step)
        known = [name for name, _ in self.starts]
        if lineage not in known:
            return None
        went_on = min(at for _, at in self.starts[known.index(lineage) + 1 :])
        behind = self.began_at - (step if step <= went_on else 2 * went_on - step)
        return 1 + (-behind) // self.every
