"""Steps of a trial's task: whoever runs it names the one that it is at, and turns that are asked from then on have that name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from steno.contracts.errors import Gone
from steno.contracts.records import ForkOf, Turn, readable
from steno.contracts.rest import Completion, SessionSpec
from steno_cli.exports.atif import trajectories
from steno_cli.terminal.tree import turn_line
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

ASKED: list[Any] = ["write it"]
NAME = "read (ünd) again"


async def answered(proxy: Proxy, trial_id: str, *messages: Any) -> Any:
    answer = await proxy.chat(trial_id, *messages)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def test_turns_name_the_step_at_which_they_were_asked_at_every_replica() -> None:
    """Also one that is answered when the next step has begun."""
    store, gate = MemoryStore(), asyncio.Event()

    def says(request: Any) -> Say:
        return Say("done", gates={0: gate} if request.job.messages[-1]["content"] == "slowly" else {})

    async with running(ParrotEngine(says), store=store) as one, running(ParrotEngine(), store=store) as two:
        await one.steno.register("t")
        await answered(two, "t", "before any step")
        assert (await one.steno.begin_task_step("t", "write")).task_step == "write"
        said = await answered(two, "t", *ASKED)
        late = asyncio.create_task(answered(one, "t", "slowly"))
        await until(lambda: len(one.engine.requests) == 1)
        await two.steno.begin_task_step("t", NAME)
        await answered(one, "t", *ASKED, said, "go on")
        gate.set()
        await late
        await one.steno.begin_task_step("t", None)
        await answered(two, "t", "after all")
        await one.steno.complete("t", Completion(reward=1.0))
        turns = [turn async for turn in two.steno.turns("t")]
        assert {str(turn.messages[-1]["content"]): turn.task_step for turn in turns} == {
            "before any step": None, "write it": "write", "go on": NAME, "slowly": "write", "after all": None,
        }  # fmt: skip
        assert turns[2].parent_id == turns[1].turn_id, "a conversation goes on from step to step"
        with pytest.raises(Gone):
            await one.steno.begin_task_step("t", "more")


async def test_what_is_told_again_names_the_step_of_the_trial_that_asks(proxy: Proxy) -> None:
    await proxy.steno.register("origin")
    await proxy.steno.begin_task_step("origin", "write")
    said = await answered(proxy, "origin", *ASKED)
    await proxy.steno.complete("origin", Completion(reward=1.0))
    [origin] = await proxy.turns("origin")
    await proxy.steno.register("fork", SessionSpec(fork_of=ForkOf(trial_id="origin", turn_id=origin.turn_id)))
    await proxy.steno.begin_task_step("fork", "first")
    assert await answered(proxy, "fork", *ASKED) == said
    await proxy.steno.begin_task_step("fork", "second")
    await answered(proxy, "fork", *ASKED, said, "go on")
    assert [(turn.task_step, turn.replayed is not None) for turn in await proxy.turns("fork", 2)] == [
        ("first", True), ("second", False),
    ]  # fmt: skip


class Meanwhile(MemoryStore):
    """While a request of the fork is compared with its origin's record, the next step begins, and another request is let in."""

    def __init__(self) -> None:
        super().__init__()
        self.enter: Callable[[str], Awaitable[object]] | None = None

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        if trial_id == "origin" and limit == 1 and self.enter is not None:
            await self.begin_task_step("fork", "second")
            await self.enter("fork")
        return await super().turns(trial_id, start=start, limit=limit)


@pytest.mark.parametrize("asked", ["write it", "something else"])
async def test_a_fork_s_turn_names_the_step_at_which_it_was_asked_though_another_began(asked: str) -> None:
    """Told again, or on record as what the trial ended by."""
    store = Meanwhile()
    async with running(ParrotEngine(), store=store) as proxy:
        await proxy.steno.register("origin")
        await answered(proxy, "origin", *ASKED)
        await proxy.steno.complete("origin", Completion(reward=1.0))
        [origin] = await proxy.turns("origin")
        await proxy.steno.register("fork", SessionSpec(fork_of=ForkOf(trial_id="origin", turn_id=origin.turn_id)))
        await proxy.steno.begin_task_step("fork", "first")
        store.enter = proxy.app.state.turns.recorder.enter
        answer = await proxy.chat("fork", asked)
        assert (answer.status_code == 200) == (asked in ASKED), answer.text
        [turn] = await proxy.turns("fork", 1)
        assert turn.task_step == "first" and (await store.session("fork")).task_step == "second"


async def test_exports_and_the_drawn_tree_name_the_step(proxy: Proxy) -> None:
    await proxy.steno.register("t")
    said = await answered(proxy, "t", *ASKED)
    await proxy.steno.begin_task_step("t", NAME)
    await answered(proxy, "t", *ASKED, said, "go on")
    session, turns = await proxy.steno.session("t"), [turn async for turn in proxy.steno.turns("t")]
    [document] = trajectories(session, turns, await proxy.steno.samples("t"))
    sampled = [step["extra"] for step in document["steps"] if step["source"] == "agent"]
    assert [extra.get("task_step") for extra in sampled] == [None, NAME]
    assert [readable(turn)["task_step"] for turn in turns] == [None, NAME]
    assert [f"step: {NAME}" in turn_line(turn).plain for turn in turns] == [False, True]
