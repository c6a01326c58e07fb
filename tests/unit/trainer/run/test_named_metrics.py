"""Names in `gdpo_metrics` that no trial has end a run, and use up nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_trainer.run.named_metrics import MOST_STEPS, NamedMetrics
from tests.unit.trainer.looping import ALL_S, GROUPS_PER_STEP, Crew, World, looped

SAID = "gdpo_metrics: got corect=2; of the last {} steps no trial with a reward has corect"


@pytest.mark.parametrize(("last", "steps"), [(None, MOST_STEPS), (GROUPS_PER_STEP, 1)])
async def test_names_that_no_trial_has_end_the_run_before_its_groups_are_used_up(
    tmp_path: Path, last: int | None, steps: int
) -> None:
    world = World(bound=3) if last is None else World(bound=3, last=last)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, estimator="gdpo", gdpo_metrics=["corect=2"], checkpoint_dir=tmp_path) as loop:
        with pytest.raises(ConfigError, match=SAID.format(steps)) as refused:
            await asyncio.wait_for(loop.run(), ALL_S)
    assert refused.value.field == "gdpo_metrics"
    assert (loop.state.step, crew.trained, crew.durable, world.acknowledged) == (0, [], set(), [])


def test_some_steps_without_it_are_no_misspelling() -> None:
    metrics = NamedMetrics(["correct"])
    for lacking in (("correct",), ("correct",), None, (), ("correct",), ("correct",), None):
        metrics.look(lacking)
    metrics.check()
    with pytest.raises(ConfigError, match="of the last 3 steps"):
        metrics.look(("correct",))
