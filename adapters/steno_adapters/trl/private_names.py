"""Attributes of TRL's trainer that have no public name, each in one place: an upgrade that renames one is an error here, and
`tests/integration/trl/test_private_names.py` says so before a run does."""

from __future__ import annotations

from typing import Any

ROWS = "_step_samples"
"""Rows of the step that has just ended, of all its micro-batches and ranks. TRL sets it to 0 after the callbacks."""
GROUPS_BEFORE = "_groups_before_resume"
"""Groups that earlier starts trained: TRL counts them where training ends by epochs, and sets it for its own worker alone."""


def rows_of_step(trainer: Any) -> int:
    """Raises: AttributeError: TRL has no such name any more."""
    rows: float = getattr(trainer, ROWS)
    return round(rows)


def count_groups_before(trainer: Any, groups: int) -> None:
    """Raises: AttributeError, as `rows_of_step`."""
    getattr(trainer, GROUPS_BEFORE)
    setattr(trainer, GROUPS_BEFORE, groups)
