"""A trial's limits hold for what is in flight as well, and without an agent that asks again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


def gated(text: str = "hello") -> tuple[asyncio.Event, ParrotEngine]:
    """An engine that says two letters and waits for the gate."""
    gate = asyncio.Event()
    return gate, ParrotEngine(lambda request: Say(text, gates={2: gate}))


async def limited(proxy: Proxy, **limits: Any) -> None:
    assert (await proxy.http.post("/sessions/t", json={"limits": limits})).status_code == 200


async def end_of(proxy: Proxy) -> tuple[str, str | None]:
    session = await proxy.store.session("t")
    return session.status, session.end_reason


async def test_more_choices_than_turns_are_left_end_the_session_and_draw_nothing(proxy: Proxy) -> None:
    await limited(proxy, max_turns=2)
    assert (await proxy.chat("t", "x")).status_code == 200
    refused = await proxy.chat("t", "y", n=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "budget_spent")
    assert await end_of(proxy) == ("completed", "limit:max_turns")
    assert len(proxy.engine.requests) == 1


async def test_turns_in_flight_count_against_the_limit_of_turns() -> None:
    gate, engine = gated()
    async with running(engine) as proxy:
        await limited(proxy, max_turns=2)
        asked = [asyncio.create_task(proxy.chat("t", f"{i}")) for i in range(5)]
        await until(lambda: sum(task.done() for task in asked) == 3 and len(engine.requests) == 2)
        gate.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 403, 403, 403]
        assert (await proxy.store.session("t")).counts.turns == 2


async def test_choices_share_the_tokens_that_are_left(proxy: Proxy) -> None:
    await limited(proxy, max_tokens=7)
    assert (await proxy.chat("t", "x", n=3)).json()["usage"]["completion_tokens"] == 6  # "hello" has six, thrice


@pytest.mark.parametrize("stream", [True, False])
async def test_turns_that_run_together_are_stopped_where_they_go_beyond_the_tokens(stream: bool) -> None:
    engine = ParrotEngine(lambda request: Say("x" * 500, gates={30: asyncio.Event()}))
    async with running(engine) as proxy:
        await limited(proxy, max_tokens=100)
        asked = [asyncio.create_task(one(proxy, stream)) for _ in range(4)]
        assert set(await asyncio.gather(*asked)) == {"broken" if stream else "403 budget_spent"}
        turns = await proxy.turns("t", at_least=4)
        assert all(turn.partial and turn.finish_reason == "cancelled" for turn in turns)
        assert 100 < sum(turn.completion_tokens for turn in turns) <= 120
        assert await end_of(proxy) == ("completed", "limit:max_tokens")
        await until(lambda: len(engine.cancelled) == 4)


async def one(proxy: Proxy, stream: bool) -> str:
    """How one request ended."""
    answer = None
    try:
        answer = await proxy.chat("t", "x", stream=stream)
    except Exception as error:  # recorded: it is the outcome
        return "broken" if "incomplete chunked read" in str(error) else repr(error)
    return f"{answer.status_code} {answer.json()['error']['code']}" if answer.status_code != 200 else "200"


async def test_the_wall_time_ends_a_turn_that_runs() -> None:
    _, engine = gated()
    async with running(engine) as proxy:
        await limited(proxy, max_wall_s=8)  # a busy machine needs a part of it for the request and its two tokens
        assert await one(proxy, stream=False) == "403 budget_spent"
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.completion_tokens) == (True, "cancelled", 2)
        assert await end_of(proxy) == ("completed", "limit:max_wall_s")


async def test_a_session_whose_time_is_over_ends_though_nobody_asks() -> None:
    async with running(sweep_s=0.05) as proxy:
        await limited(proxy, max_idle_s=0.2)
        await proxy.chat("t", "x")
        async with asyncio.timeout(60):
            while (await end_of(proxy))[0] == "open":
                await asyncio.sleep(0.01)
        assert await end_of(proxy) == ("completed", "limit:max_idle_s")


async def test_a_turn_that_runs_and_an_agent_that_has_not_begun_are_not_idle() -> None:
    gate, engine = gated()
    async with running(engine) as proxy:
        await limited(proxy, max_idle_s=1000)
        recorder = proxy.app.state.turns.recorder
        recorder._clock = lambda: time.time() + 2000
        assert await recorder.end_timed_out() == 0
        asked = asyncio.create_task(proxy.chat("t", "x"))
        await until(lambda: engine.requests)
        recorder._clock = lambda: time.time() + 4000
        assert await recorder.end_timed_out() == 0
        gate.set()
        assert (await asked).status_code == 200
        assert (await end_of(proxy))[0] == "open"


@pytest.mark.parametrize("path", ["messages/count_tokens", "responses/input_tokens", "chat/completions"])
async def test_what_is_counted_may_be_as_large_as_what_is_generated_from(path: str) -> None:
    text = "x" * (2 * 2**20)
    said = {"input": text} if path.startswith("responses") else {"messages": [{"role": "user", "content": text}]}
    async with running(ParrotEngine(context_tokens=2**22)) as large:
        answer = await large.http.post(f"/t/v1/{path}", json={"model": "any", "max_tokens": 4} | said)
        assert answer.status_code == 200, answer.text[:300]
    async with running(max_body_bytes=2**20) as small:
        answer = await small.http.post(f"/t/v1/{path}", json={"model": "any", "max_tokens": 4} | said)
        assert answer.status_code == 413, answer.text[:300]


class SlowToCommit(MemoryStore):
    """Commits wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = 0

    async def commit(self, *args: Any, **options: Any) -> int:
        self.waiting += 1
        await self.gate.wait()
        return await super().commit(*args, **options)


async def test_a_turn_that_is_being_recorded_counts_against_the_limit_of_turns() -> None:
    store = SlowToCommit()
    async with running(store=store) as proxy:
        await limited(proxy, max_turns=1)
        first = asyncio.create_task(proxy.chat("t", "x"))
        await until(lambda: store.waiting)
        second = await proxy.chat("t", "y")
        assert (second.status_code, second.json()["error"]["code"]) == (403, "budget_spent")
        store.gate.set()
        assert (await first).status_code == 200 and len(proxy.engine.requests) == 1


async def test_what_a_turn_beside_it_has_used_up_a_turn_that_runs_can_not_use_again() -> None:
    gate = asyncio.Event()
    says = [Say("x" * 500, gates={30: gate, 45: asyncio.Event()}), Say("y" * 59)]
    async with running(ParrotEngine(lambda request: says[len(proxy.engine.requests) - 1])) as proxy:
        await limited(proxy, max_tokens=100)
        long = asyncio.create_task(proxy.chat("t", "x"))
        await until(lambda: proxy.engine.requests)
        assert (await proxy.chat("t", "y")).status_code == 200  # 60 tokens
        gate.set()
        assert (await long).status_code == 403
        assert await end_of(proxy) == ("completed", "limit:max_tokens")
        *_, turn = await proxy.turns("t", at_least=2)
        assert turn.partial and 40 < turn.completion_tokens <= 45


async def test_what_is_on_record_of_an_open_turn_counts_once() -> None:
    """A block of it was closed before it had ended."""
    gate = asyncio.Event()
    calls = [("c0", "f", "{}"), ("c1", "f", "{}")]
    says = [Say("x" * 40, calls=calls, gates={42: gate}), Say("y" * 29), Say("z" * 9)]
    async with running(ParrotEngine(lambda request: says[len(proxy.engine.requests) - 1])) as proxy:
        await limited(proxy, max_tokens=100)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 90, "stream": True}
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
        long = asyncio.create_task(proxy.http.post("/t/v1/messages", json=body))
        await proxy.turns("t", 1)
        assert (await proxy.chat("t", "y")).status_code == 200  # 30 tokens beside its 43
        assert (await proxy.chat("t", "z")).status_code == 200  # 10
        gate.set()
        assert "message_stop" in (await long).text
        assert (await proxy.store.session("t")).counts.completion_tokens == 83
        assert (await end_of(proxy))[0] == "open"


async def test_the_last_turn_that_may_be_runs_to_its_end_whoever_asks_meanwhile() -> None:
    """A block of it is on record, so it counts as a turn already."""
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("x" * 5, calls=[("c0", "f", "{}"), ("c1", "f", "{}")], gates={7: gate}))
    async with running(engine) as proxy:
        await limited(proxy, max_turns=1)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 90, "stream": True}
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
        last = asyncio.create_task(proxy.http.post("/t/v1/messages", json=body))
        await proxy.turns("t", 1)
        beside = await proxy.chat("t", "y")
        assert (beside.status_code, beside.json()["error"]["code"]) == (403, "budget_spent")
        assert (await end_of(proxy))[0] == "open"
        gate.set()
        assert "message_stop" in (await last).text
        assert (await proxy.chat("t", "z")).status_code == 403
        assert await end_of(proxy) == ("completed", "limit:max_turns")
        [turn] = await proxy.turns("t")
        assert not turn.partial
