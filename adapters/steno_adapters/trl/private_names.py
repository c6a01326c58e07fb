"""All private names of TRL that are used here: an upgrade of TRL that renames one raises an error here, and
`tests/integration/trl/test_private_names.py` says so before a run does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from trl.experimental.async_grpo import async_grpo_trainer

ROWS = "_step_samples"
"""Rows of the step that has just ended, of all its micro-batches and ranks. TRL sets it to 0 after the callbacks."""
GROUPS_BEFORE = "_groups_before_resume"
"""Groups that earlier starts trained: TRL counts them where training ends by epochs, and sets it for its own worker alone."""
PARAMETERS = "_iter_vllm_named_params"
"""A function of the trainer's module: (name in the checkpoint, parameter) of a model, without its adapter's own."""


def rows_of_step(trainer: Any) -> int:
    """The number that `ROWS` has. Raises: AttributeError: TRL has no such name any more."""
    rows: float = getattr(trainer, ROWS)
    return round(rows)


def count_groups_before(trainer: Any, groups: int) -> None:
    """Set `GROUPS_BEFORE`. Raises: AttributeError, as `rows_of_step`."""
    getattr(trainer, GROUPS_BEFORE)
    setattr(trainer, GROUPS_BEFORE, groups)


def checkpoint_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """What `PARAMETERS` yields for the model. Raises: AttributeError, as `rows_of_step`."""
    found: Iterator[tuple[str, nn.Parameter]] = getattr(async_grpo_trainer, PARAMETERS)(model)
    return found
