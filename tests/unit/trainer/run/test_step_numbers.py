"""What others are told of a step: batches that change no weight leave its numbers alone, wherever they are kept by step."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.run.step_numbers import shown_step
from steno_trainer.run.training_state import TrainingState
from tests.unit.trainer.looping import ALL_S, Crew, World, looped

MEASURED = {"reward/mean": 0.25, "eval/reward": 0.5}


class Lines:
    """Trackers. steps: of each line, whether it is of a step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def log(self, step: int, values: Any, ledger: Any, *, stepped: bool = True) -> None:
        self.steps.append((step, stepped))


def test_the_proxy_is_told_of_a_batch_that_changed_nothing_what_was_evaluated_alone() -> None:
    state = TrainingState("r", VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 3))))
    step, evaluation = (shown_step(state, MEASURED, ["g"], stepped) for stepped in (True, False))
    assert step is not None and step.values == MEASURED and step.ledger
    assert evaluation is not None and evaluation.values == {"eval/reward": 0.5} and not evaluation.ledger
    assert shown_step(state, {"reward/mean": 1.0}, ["g"], False) is None


async def test_trackers_are_told_which_batches_changed_no_weight(tmp_path: Path) -> None:
    """With dynamic sampling they come by themselves, and bear the step before."""
    world = World(bound=1, alike=8)
    lines: Any = Lines()
    file = tmp_path / "metrics.jsonl"
    async with looped(world, Crew(world, push_s=0.0), dynamic_sampling=True, metrics_file=file) as loop:
        loop._trackers = lines
        await asyncio.wait_for(loop.run(), ALL_S)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines.steps == [(line["step"], line["stepped"]) for line in written]
    assert Counter(step for step, stepped in lines.steps if stepped) == dict.fromkeys(range(1, 7), 1)
    assert any(not stepped for _, stepped in lines.steps), "else nothing was tried"


async def test_a_metrics_file_that_can_not_be_written_any_more_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is full, say: the numbers go wherever else they go."""
    world = World()
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, total_steps=2, metrics_file=tmp_path) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert [step for step, _ in crew.saves] == [1, 2]
    assert f"metrics_file: the line of step 2 is not in {tmp_path}: Is a directory" in caplog.text
