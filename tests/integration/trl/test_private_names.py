"""Names of TRL's that have an underscore: an upgrade that gives them up is seen here."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_trainer import _EpochStopCallback

from steno_adapters.trl import AsyncRollouts
from steno_adapters.trl.private_names import GROUPS_BEFORE, PARAMETERS, ROWS, count_groups_before, rows_of_step

pytestmark = pytest.mark.trl


def test_trl_still_has_each_of_them() -> None:
    source = inspect.getsource(AsyncGRPOTrainer)
    for name in (GROUPS_BEFORE, ROWS):
        assert f"self.{name}" in source, name
    assert f"def {PARAMETERS}(" in inspect.getsource(async_grpo_trainer)


def test_a_name_that_is_gone_is_an_error_and_no_number() -> None:
    trainer = SimpleNamespace()
    with pytest.raises(AttributeError, match=ROWS):
        rows_of_step(trainer)
    with pytest.raises(AttributeError, match=GROUPS_BEFORE):
        count_groups_before(trainer, 1)


@pytest.mark.parametrize(("before", "ends"), [(2, False), (3, True)])
def test_a_run_of_epochs_that_goes_on_ends_by_the_groups_of_all_its_starts(
    before: int, ends: bool, tmp_path: Path
) -> None:
    collector: Any = None
    rollouts = AsyncRollouts(collector, [{"task_id": "a"}])
    trainer: Any = SimpleNamespace(
        _groups_before_resume=0,
        _trained_groups={0},
        accelerator=SimpleNamespace(device="cpu", reduce=lambda tensor, reduction: tensor),
    )
    rollouts._trainer = trainer
    rollouts.began(4, tmp_path, 1, {"finished": [], "passed": {}, "begun": [], "groups": before})
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    _EpochStopCallback(trainer, 4).on_step_end(SimpleNamespace(save_strategy="no"), None, control)
    assert control.should_training_stop is ends
