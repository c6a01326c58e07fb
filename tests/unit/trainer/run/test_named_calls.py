"""Names in `train_models` that no call asks for end a run, and use up nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from steno.contracts.errors import ConfigError
from steno_trainer.checkpoints.checkpoint import RunState
from steno_trainer.run.named_calls import MOST_STEPS
from tests.unit.trainer.looping import ALL_S, GROUPS_PER_STEP, Crew, World, looped


async def test_names_that_no_call_asked_for_end_the_run_before_its_groups_are_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(bound=3)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["main", "sub-*"]) as loop:
        with pytest.raises(ConfigError, match=r"got main, sub-\*; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (loop.state.step, crew.trained, crew.durable, world.acknowledged) == (0, [], set(), [])
    assert caplog.text.count("train_models: got main, sub-*; its calls asked for 'policy'") == MOST_STEPS - 1


async def test_rollouts_that_are_over_before_that_are_not_used_up_either() -> None:
    world = World(bound=3, last=GROUPS_PER_STEP)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["main"]) as loop:
        with pytest.raises(ConfigError, match="train_models: got main; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (crew.durable, world.acknowledged) == (set(), [])


async def test_a_run_whose_names_were_asked_for_goes_on_where_they_are_not() -> None:
    world = World(bound=2, names={f"g{n}": "other" for n in range(GROUPS_PER_STEP, 6 * GROUPS_PER_STEP)})
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["policy"], total_steps=2) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.step == 2
    assert loop.state.ledger.total().untrained["other_model"] >= 6 * GROUPS_PER_STEP * (MOST_STEPS + 1)


async def stopped(models: list[str]) -> RunState:
    """A run that has trained one step under these names."""
    world = World(bound=3)
    async with looped(world, Crew(world, push_s=0.0), train_models=models, total_steps=1) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.ledger.total().trained > 0
    return msgspec.msgpack.decode(msgspec.msgpack.encode(loop.state.saved()), type=RunState)


@pytest.mark.parametrize("before", [[], ["policy"], ["policy", "main"]])
async def test_names_that_are_wrong_since_a_resume_end_the_run_as_they_do_from_its_beginning(before: list[str]) -> None:
    saved = await stopped(before)
    world = World(bound=3)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, saved=saved, train_models=["polcy"]) as loop:
        with pytest.raises(ConfigError, match="train_models: got polcy; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (loop.state.step, crew.durable, world.acknowledged) == (1, set(), [])


@pytest.mark.parametrize(
    "old", [False, True], ids=["by this release", "by one that does not know which names they were"]
)
async def test_a_run_that_is_gone_on_with_under_its_names_need_not_find_them_again(old: bool) -> None:
    saved = await stopped(["policy", "main"])
    assert saved.named_models == ("main", "policy")
    if old:
        saved = msgspec.structs.replace(saved, named_models=None)
    world = World(bound=3)
    async with looped(world, Crew(world, push_s=0.0), saved=saved, train_models=["main", "policy"]) as loop:
        for _ in range(MOST_STEPS + 1):
            loop._named_calls.look(False, ["other"])
        loop._named_calls.check()


async def test_steps_whose_rewards_are_equal_say_nothing_of_names(caplog: pytest.LogCaptureFixture) -> None:
    world = World(bound=3, alike=1000, last=2 * GROUPS_PER_STEP)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["pol*"]) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert "train_models" not in caplog.text


@pytest.mark.parametrize("names", [{}, {"g0": "main"}], ids=["by no call", "by another policy's"])
async def test_groups_that_the_policy_had_no_call_in_say_nothing_of_names(names: dict[str, str]) -> None:
    first = [f"g{n}" for n in range(GROUPS_PER_STEP)]
    world = World(bound=3, policies=dict.fromkeys(first, "judge"), names=names)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["main"]) as loop:
        with pytest.raises(ConfigError, match="got main; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (loop.state.step, crew.trained) == (0, [])
