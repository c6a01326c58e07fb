"""The order of things in the loop, with everything around it that decides it: the feed, admission, the ledger. Weights reach the
workers late, as they do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import Forbidden, Superseded
from steno_trainer.data import lease_feed as feed_module
from steno_trainer.data.ledger import Reason
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import CopyFailed, NotFinite, PushFailed
from steno_trainer.run import ending, pushes
from steno_trainer.run import loop as loop_module
from steno_trainer.run.loop import LEFT_OUT, MOST_SKIPPED
from tests.support.clock import ClockAhead
from tests.support.waiting import until
from tests.unit.trainer.looping import ALL_S, GROUPS_PER_STEP, Crew, World, looped
from tests.unit.trainer.recorded import VOCABULARY


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3], ids=["each step saved", "some steps saved"])
async def test_admission_alone_keeps_the_bound_while_weights_are_on_their_way(bound: int, every: int) -> None:
    world = World(bound=bound)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, checkpoint_every=every) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
        total = loop.state.ledger.total()
    assert total.untrained == {} and total.trained == total.sampled > 0
    assert crew.durable >= set(world.acknowledged) >= set(crew.trained), (
        "and nothing is acknowledged that could be lost"
    )


async def test_weights_that_are_pushed_now_and_then_count_as_what_they_are() -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, push_every=3) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.ledger.total().untrained == {}
    assert {PolicyVersion.parse(version).step for version in world.started.values()} == {0, 3, 6}


async def test_rollouts_wait_for_weights_that_nobody_takes_at_first() -> None:
    world = World(bound=0)
    crew = Crew(world, push_s=0.1)
    crew.refuse = {2}
    async with looped(world, crew) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: any(push.settled and not push.served for push in crew.pushes))
        started = len(world.started)
        await asyncio.sleep(0.3)
        assert len(world.started) == started, "what older weights sampled now would be stale"
        crew.pushes[-1].serve()  # posted again, and taken
        await asyncio.wait_for(running, ALL_S)
    assert loop.state.ledger.total().untrained == {}


@pytest.mark.parametrize("bound", [0, 1])
async def test_weights_that_nobody_could_take_by_difference_are_sent_whole_before_the_next_step(bound: int) -> None:
    world = World(bound=bound)
    crew = Crew(world, push_s=0.1)
    crew.refuse, crew.by_difference = {2, 4}, True
    async with looped(world, crew) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    pushed = [PolicyVersion.parse(push.version).step for push in crew.pushes]
    assert sorted(set(pushed)) == list(range(7)) and pushed == sorted(pushed), "a version of an earlier step came later"
    assert pushed.count(2) == (2 if bound == 0 else pushed.count(2)) and all(push.served for push in crew.pushes[-1:])
    assert loop.state.ledger.total().untrained == {}


async def test_a_full_copy_that_fails_while_groups_are_waited_for_ends_the_run() -> None:
    """These groups never come: admission waits for the weights that nobody could take."""
    world = World(bound=0)
    crew = Crew(world, push_s=0.1)
    crew.refuse, crew.by_difference = {2}, True
    publish = crew.publish

    def fails(version: PolicyVersion) -> Any:
        if any(push.version == str(version) for push in crew.pushes):
            raise CopyFailed("rank 0: No space left on device")
        return publish(version)

    crew.publish = fails  # type: ignore[method-assign]
    async with looped(world, crew) as loop:
        with pytest.raises(CopyFailed, match="No space left"):
            await asyncio.wait_for(loop.run(), ALL_S)


async def test_an_upload_may_take_longer_than_workers_have_to_load_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pushes, "SETTLING_S", 0.3)
    world = World(bound=1)
    crew = Crew(world, push_s=0.1)
    crew.upload_s = 1e9  # until the test says so
    async with looped(world, crew, push_deadline_s=0.1, total_steps=1) as loop:
        running = asyncio.create_task(loop.run())
        for step in range(2):
            said = f"a/{step} is still being uploaded after"
            await until(lambda said=said: said in caplog.text)
            crew.pushes[step].uploading = False
            crew.pushes[step].serve()
        await asyncio.wait_for(running, ALL_S)
    assert all(push.served for push in crew.pushes) and len(crew.pushes) == 2


@pytest.mark.parametrize("begins", [True, False], ids=["the upload began", "the upload ended"])
async def test_a_process_that_stood_still_while_weights_were_uploaded_has_not_waited_for_workers(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    clock = ClockAhead()
    monkeypatch.setattr(pushes, "time", clock)
    world = World(bound=1)
    crew = Crew(world, push_s=1e9)  # nothing happens by itself
    crew.upload_s = 1e9
    async with looped(world, crew, total_steps=1) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: crew.pushes)
        crew.pushes[0].uploading = not begins
        await asyncio.sleep(3 * pushes.LOOK_S)
        clock.by_s = 3600.0  # this process stands still for longer than workers have
        crew.pushes[0].uploading = begins
        await asyncio.sleep(3 * pushes.LOOK_S)
        assert not running.done()
        for step in range(2):
            await until(lambda step=step: len(crew.pushes) > step)
            crew.pushes[step].uploading = False
            crew.pushes[step].serve()
        await asyncio.wait_for(running, ALL_S)
    assert crew.pushes[0].served


async def test_first_weights_that_no_worker_loads_in_time_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "SETTLING_S", 0.3)
    world = World(bound=1)
    crew = Crew(world, push_s=1e9)
    crew.upload_s = 0.5
    async with looped(world, crew, push_deadline_s=0.1) as loop:
        with pytest.raises(PushFailed, match="no worker serves a/0: its update is running"):
            await asyncio.wait_for(loop.run(), ALL_S)


@pytest.mark.parametrize("bound", [0, 1])
async def test_every_step_trains_as_many_groups_where_few_say_something(bound: int) -> None:
    world = World(bound=bound, alike=4)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, dynamic_sampling=True) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
        total = loop.state.ledger.total()
    assert crew.batches == [GROUPS_PER_STEP] * 6
    assert total.untrained.keys() == {"zero_variance"} and total.untrained["zero_variance"] >= 2 * total.trained
    assert crew.durable >= set(world.acknowledged) >= set(crew.trained)


async def test_a_teacher_scores_every_group_whatever_its_rewards() -> None:
    world = World(bound=1, alike=4)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, distillation=0.5, reference="teacher") as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
        total = loop.state.ledger.total()
    assert crew.batches == [GROUPS_PER_STEP] * 6 and total.untrained == {} and total.trained == total.sampled > 0


async def test_what_is_stopped_in_the_middle_lets_go_of_all_that_it_saved() -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, push_every=2, checkpoint_every=100, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.state.step == 3)
        loop.stop()
        await asyncio.wait_for(running, ALL_S)
    assert set(crew.trained) <= crew.durable == set(world.acknowledged)
    assert not set(world.released) & crew.durable


def left_out(folder: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (folder / LEFT_OUT).read_text().splitlines()]
    return [(row["group"], row["reason"]) for row in rows]


async def test_groups_that_can_not_be_trained_are_named_booked_and_let_go(tmp_path: Path) -> None:
    world = World(bound=1, rewards={"g3": 1e200})
    crew = Crew(world, push_s=0.1)
    crew.poison = {"g6"}
    async with looped(world, crew, checkpoint_dir=tmp_path) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    total = loop.state.ledger.total()
    named = dict(left_out(tmp_path))
    assert named["g3"] == "malformed" and named["g6"] == "poisoned"
    poisoned = {group for group, reason in named.items() if reason == "poisoned"}
    assert total.untrained == {"malformed": 6, "poisoned": 6 * len(poisoned)}
    assert total.sampled == total.trained + 6 + 6 * len(poisoned)
    assert loop.state.step == 6, "a step that changed nothing is none"
    assert {"g3", *poisoned} <= set(world.acknowledged) and not {"g3", *poisoned} & set(crew.trained)


async def test_weights_that_train_nothing_end_the_run_once_its_books_are_saved(tmp_path: Path) -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.1)
    crew.poison = {f"g{n}" for n in range(2, 100)}
    async with looped(world, crew, checkpoint_dir=tmp_path, checkpoint_every=100) as loop:
        with pytest.raises(NotFinite, match=f"{MOST_SKIPPED} steps in a row"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert crew.saves == [(1, True)], "the checkpoint to go back to stays"
    assert len(left_out(tmp_path)) == MOST_SKIPPED * GROUPS_PER_STEP
    assert {group for group, _ in left_out(tmp_path)} <= crew.durable & set(world.acknowledged)


async def test_what_ends_after_a_skipped_step_spares_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "OVER_S", 0.01)
    world = World(bound=1, last=4)
    crew = Crew(world, push_s=0.0)
    crew.poison = {"g2"}
    async with looped(world, crew, checkpoint_dir=tmp_path) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert crew.saves == [(1, False), (1, True)]


async def test_an_acknowledgement_that_fails_ends_the_run_whichever_push_it_was_of() -> None:
    """It is of the first step's groups, and is answered once the weights of the second step are on their way."""
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    world.hold["acknowledge"] = asyncio.Event()
    world.failures["acknowledge"] = [Forbidden("not an admin's key")]
    async with looped(world, crew, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: world.calls["acknowledge"] and len(crew.pushes) >= 3)
        world.hold.pop("acknowledge").set()
        with pytest.raises(Forbidden, match="not an admin's key"):
            await asyncio.wait_for(running, ALL_S)


async def test_who_is_superseded_ends_without_a_checkpoint() -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, checkpoint_every=100, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.state.step >= 2)
        loop.fail(Superseded("another trainer has taken over"))
        with pytest.raises(Superseded):
            await asyncio.wait_for(running, ALL_S)
    assert crew.trained and not crew.durable


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for at the end, in the time of a test."""
    monkeypatch.setattr(ending, "ENDING_S", 0.2)
    monkeypatch.setattr(feed_module, "GIVE_BACK_S", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("state", ["first push", "groups", "a push", "acknowledge", "extend", "evaluation", "numbers"])
async def test_it_ends_whatever_it_waits_for(state: str) -> None:
    """The proxy is away, or workers take no weights: nobody answers any more, in none of these calls."""
    world = World(bound=1)
    crew = Crew(world, push_s=1e9 if state == "first push" else 0.0)
    never = asyncio.Event()
    async with looped(world, crew, checkpoint_every=2, total_steps=None) as loop:
        waits = False

        async def stands_still(*_: Any, **__: Any) -> Any:
            nonlocal waits
            waits = True
            await never.wait()

        running = asyncio.create_task(loop.run())
        if state == "first push":
            await until(lambda: crew.pushes)
        else:
            await until(lambda: loop.state.step >= 2)
            for name in ("lease", "samples", "acknowledge", "release", "extend") if state != "a push" else ():
                world.hold[name] = never
            if state == "a push":
                crew.push_s = 1e9
                at = len(crew.pushes)
                await until(lambda: len(crew.pushes) >= at + 2 or crew.pushes[-1].push_s == 1e9)
            elif state in ("evaluation", "numbers"):
                for name in ("lease", "samples", "acknowledge", "extend"):
                    world.hold.pop(name)
                if state == "evaluation":
                    loop._evaluator = SimpleNamespace(due=lambda step: True, run=stands_still)  # type: ignore[assignment]
                else:
                    loop._status = SimpleNamespace(run=stands_still)  # type: ignore[assignment]
                await until(lambda: waits)
        loop.stop()
        await asyncio.wait_for(running, ALL_S)
    assert set(crew.trained) <= crew.durable, "all of it is saved"


@pytest.mark.parametrize("last", [0, 3, 4])
@pytest.mark.parametrize("alike", [0, 3], ids=["all differ", "one of three differs"])
async def test_rollouts_that_are_over_end_the_run_with_all_that_there_is(
    last: int, alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "OVER_S", 0.01)
    world = World(last=last, alike=alike)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, total_steps=50, checkpoint_every=50, dynamic_sampling=bool(alike)) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    silent = [name for name in world.started if alike and int(name[1:]) % alike]
    assert len(world.started) == last
    assert sorted(crew.trained) == sorted(set(world.started) - set(silent)), "an incomplete step is one"
    assert sorted(world.acknowledged) == sorted(world.started) == sorted(crew.durable)


async def test_groups_with_ids_that_the_reference_lacks_are_booked_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "OVER_S", 0.01)
    world = World(last=2)
    async with looped(world, Crew(world, push_s=0.0)) as loop:
        loop._limits = replace(loop._limits, lacking=frozenset(range(VOCABULARY)))
        await asyncio.wait_for(loop.run(), ALL_S)
    total = loop.state.ledger.total()
    assert total.untrained == {Reason.MALFORMED: total.sampled} and loop.state.step == 0
