"""`GET /ui/sessions/{trial_id}/live`: the end of what is being sampled, bounded, for readers alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from steno_proxy.api.control import under_way
from steno_proxy.api.control.under_way import MOST_LETTERS
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


async def live(proxy: Proxy, trial_id: str, **headers: str) -> list[dict[str, Any]]:
    answer = await proxy.http.get(f"/ui/sessions/{trial_id}/live", headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


async def test_the_end_of_an_answer_is_there_while_it_is_sampled_and_not_after() -> None:
    text, gate = "x" * 9000 + "the end", asyncio.Event()
    say = Say(text=text, reasoning="because", gates={len(text) + 7: gate}, calls=[("own", "bash", "a" * 5000)])
    async with running(ParrotEngine(lambda request: say)) as proxy:
        assert await live(proxy, "alive") == []
        asking = asyncio.create_task(proxy.chat("alive", "go on"))
        async with asyncio.timeout(60):
            while not (found := await live(proxy, "alive")) or found[0]["tokens"] < len(text) + 7:
                await asyncio.sleep(0.01)
        [answer] = found
        assert answer["content"] == text[-MOST_LETTERS:] and answer["cut"] and answer["reasoning"] == "because"
        assert answer["calls"] == []
        gate.set()
        assert (await asking).status_code == 200
        [turn] = await proxy.turns("alive", 1)
        assert turn.turn_id == answer["turn_id"]
        assert await live(proxy, "alive") == []


async def test_two_completions_of_a_request_are_both_there_and_a_call_by_its_name() -> None:
    gate = asyncio.Event()
    say = Say(calls=[("a", "read", "{}"), ("b", "bash", '{"command": "ls"}')], gates={2: gate})
    async with running(ParrotEngine(lambda request: say)) as proxy:
        asking = asyncio.create_task(proxy.chat("alive", "go on", n=2))
        async with asyncio.timeout(60):
            while [each["tokens"] for each in await live(proxy, "alive")] != [2, 2]:
                await asyncio.sleep(0.01)
        for answer in await live(proxy, "alive"):
            assert answer["calls"] == [{"name": "bash", "arguments": '{"command": "ls"}'}] and answer["cut"]
        gate.set()
        assert (await asking).status_code == 200


async def test_of_many_the_newest_are_sent_and_the_ids_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "MOST_ANSWERS", 2)
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("hello", gates={1: gate}))) as proxy:
        asking = [asyncio.create_task(proxy.chat("alive", f"go on {number}")) for number in range(3)]
        async with asyncio.timeout(60):
            while len((found := (await proxy.http.get("/ui/sessions/alive/live")).json())["older"]) < 1:
                await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*asking)
        shown = sorted([*found["older"], *(answer["turn_id"] for answer in found["items"])])
        assert len(found["items"]) == 2 and shown == sorted(turn.turn_id for turn in await proxy.turns("alive", 3))


async def test_only_readers_see_it() -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(lambda request: Say("hello", gates={1: gate}))
    async with running(engine, admin_key="admin", viewer_key="viewer") as proxy:
        await proxy.http.post("/sessions/alive", json={})
        asking = asyncio.create_task(proxy.chat("alive", "go on"))
        await until(lambda: engine.requests)
        path = "/ui/sessions/alive/live"
        for key, status in (("viewer", 200), ("admin", 200), (proxy.agent_key("alive"), 403), ("wrong", 403)):
            answer = await proxy.http.get(path, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, (key, answer.text)
        assert (await proxy.http.get(path, params={"after": "1"})).status_code == 400
        gate.set()
        assert (await asking).status_code == 200
