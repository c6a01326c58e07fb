"""Evaluation in the loop: by the weights of its step and no others, and nothing else waits for it or ends with it."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import ConfigError, NoWorker, StenoError, Superseded, Unreachable
from steno_trainer.data.staleness import PolicyVersion
from tests.support.waiting import until
from tests.unit.trainer.looping import ALL_S, Crew, World, looped


class Evaluations:
    """An `Evaluator`. seen: of each evaluation the step, and the version that answered. fails: step -> what is raised."""

    def __init__(self, world: World, every: int = 1, fails: dict[int, StenoError] | None = None) -> None:
        self._world, self._every, self._fails = world, every, fails or {}
        self.seen: list[tuple[int, str]] = []

    def due(self, step: int) -> bool:
        return step % self._every == 0

    async def run(self, step: int, version: str) -> Any:
        if step in self._fails:
            raise self._fails[step]
        self.seen.append((step, self._world.served))
        assert self._world.served == version, "other weights answer"
        return SimpleNamespace(scalars=lambda: {"eval/reward": 0.5})

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.seen]


class Logged:
    """Trackers. rewards: step -> `eval/reward`."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}

    def log(self, step: int, values: dict[str, float], *_: Any, **__: Any) -> None:
        self.rewards |= {step: values["eval/reward"]} if "eval/reward" in values else {}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno == logging.WARNING and "evaluated" in one.message]


@pytest.mark.parametrize("bound", [0, 1])
async def test_weights_that_are_sent_whole_are_so_before_they_are_evaluated(bound: int) -> None:
    world = World(bound=bound)
    crew = Crew(world, push_s=0.1)
    crew.refuse, crew.by_difference = {2, 4, 6}, True
    evaluations = Evaluations(world)
    async with looped(world, crew, evaluations) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert evaluations.steps == list(range(7))
    pushed = [PolicyVersion.parse(push.version).step for push in crew.pushes]
    assert pushed == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


async def test_a_step_waits_for_its_push_only_where_it_is_evaluated() -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.0)
    evaluations = Evaluations(world, every=3)
    async with looped(world, crew, evaluations) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: crew.pushes and crew.pushes[0].served)
        crew.push_s = 1e9  # until the test says so
        await until(lambda: len(crew.batches) == 2)
        assert [push.served for push in crew.pushes] == [True, False], (
            "the second step has begun before the first is served"
        )
        crew.push_s = 0.0
        crew.pushes[-1].serve()
        await asyncio.wait_for(running, ALL_S)
    assert evaluations.steps == [0, 3, 6]


async def test_weights_that_nobody_took_are_not_evaluated_by_older_ones(caplog: pytest.LogCaptureFixture) -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.0)
    crew.refuse = {2}
    evaluations, logged = Evaluations(world, every=2), Logged()
    async with looped(world, crew, evaluations) as loop:
        loop._trackers = logged  # type: ignore[assignment]
        await asyncio.wait_for(loop.run(), ALL_S)
    assert evaluations.seen == [(0, "a/0"), (4, "a/4"), (6, "a/6")]
    assert logged.rewards.keys() == {0, 4, 6} and loop.state.step == 6
    assert warned(caplog) == ["step 2 is not evaluated: no worker serves a/2"]


@pytest.mark.parametrize("error", [Unreachable("no answer from the proxy"), NoWorker("no worker serves the model")])
async def test_an_evaluation_that_can_not_be_had_now_is_left_out_and_training_goes_on(
    error: StenoError, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    evaluations, logged = Evaluations(world, every=2, fails={0: error, 4: error}), Logged()
    async with looped(world, crew, evaluations) as loop:
        loop._trackers = logged  # type: ignore[assignment]
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.step == 6 and logged.rewards.keys() == {2, 6}
    assert warned(caplog) == [f"step {step} is not evaluated, training goes on: {error}" for step in (0, 4)]


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("error", [ConfigError("command: not found"), Superseded("another trainer has taken over")])
async def test_an_evaluation_that_asking_again_would_not_mend_ends_the_run(error: StenoError, step: int) -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, Evaluations(world, every=2, fails={step: error})) as loop:
        with pytest.raises(type(error), match=error.message):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.step == step
