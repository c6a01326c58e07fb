"""Slices of large work: whose turn it is, and what is done in one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from steno.contracts.lenient import read_json
from steno.contracts.rest import TurnPage
from steno.contracts.runs.leases import GroupList, GroupPlace, RunList, RunView
from steno.contracts.runs.training_steps import TrainingStep, TrainingStepPage
from steno_proxy.api.agent_http import IncomingBody, read_body
from steno_proxy.api.common import encoded, encoded_items
from steno_proxy.api.control.groups import LISTED_AT_ONCE, list_groups
from steno_proxy.api.control.runs import VIEWED_AT_ONCE, list_runs
from steno_proxy.api.control.steps import STEPS_AT_ONCE, read_steps
from steno_proxy.config.settings import ProxySettings
from steno_proxy.pace import LARGE_BYTES, STEPS_BETWEEN, Pace
from steno_proxy.server.app import create_app
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis import lists
from steno_proxy.store.redis import runs as redis_runs
from steno_proxy.store.redis.link.redis_link import RedisLink
from steno_proxy.store.redis.lists import RedisLists
from steno_proxy.store.redis.recordings import RedisRecordings
from steno_proxy.store.redis.runs import RedisRuns
from tests.support.records.recordings import row, turn


class Noted(Pace):
    """Notes its turns in `said`."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    async def turn(self) -> None:
        await super().turn()
        self.said.append("turn")


def asked(pace: Pace, **services: Any) -> Request:
    """A request that has got as far as its route."""
    app = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(pace=pace, **services)))
    return Request({"type": "http", "headers": [], "app": app})


@pytest.mark.parametrize("large", [1, 3])
async def test_what_comes_during_a_slice_takes_several_steps_before_the_next(large: int) -> None:
    pace, said = Pace(), list[str]()

    async def work() -> None:
        for _ in range(3):
            await pace.turn()
            said.append("slice")
            small.append(asyncio.ensure_future(answer()))  # its request came meanwhile

    async def answer() -> None:
        for _ in range(STEPS_BETWEEN - 2):  # that it is awaited, and its first step, are two
            await asyncio.sleep(0)
        said.append("answer")

    small: list[asyncio.Future[None]] = []
    await asyncio.gather(*(work() for _ in range(large)))
    await asyncio.gather(*small)
    assert said == ["slice", "answer"] * 3 * large


@pytest.mark.parametrize(("parts", "turns"), [(1, 0), (2, 0), (300, 1)])
async def test_a_long_body_is_put_together_in_a_slice(parts: int, turns: int) -> None:
    part, pace = b"x" * (LARGE_BYTES // 200), Noted()
    left = iter(range(parts))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": part, "more_body": next(left) < parts - 1}

    incoming = IncomingBody(receive, max_bytes=LARGE_BYTES * 2, timeout_s=10.0)
    body = await read_body({"headers": []}, incoming, pace=pace)
    assert (body == part * parts, pace.said) == (True, ["turn"] * turns)


class Answered(RedisRecordings):
    """Whose scripts are answered at once."""

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any], *, writes: bool = True) -> Any:
        assert isinstance(self._pace, Noted)
        self._pace.said.append(name)
        return [0]


@pytest.mark.parametrize(("length", "last"), [(100, "commit"), (LARGE_BYTES + 1, "turn")])
async def test_what_follows_a_long_commit_is_a_slice(length: int, last: str) -> None:
    pace, done = Noted(), turn(0, messages=[{"role": "user", "content": "x" * length}])
    assert await Answered(RedisLink("redis://127.0.0.1:1/0"), pace).commit("t", done, row(done), now=1.0) == 0
    assert pace.said[-1] == last and pace.said.count("commit") == 1


async def test_a_page_of_turns_as_json_is_made_a_turn_at_a_time() -> None:
    """And says what it said in one piece."""
    steps = 0

    async def other() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    page, pace = TurnPage(items=[turn(number) for number in range(4)], next_start=4), Noted()
    request = asked(pace)
    streaming = asyncio.create_task(other())
    found = await encoded_items(request, page)
    streaming.cancel()
    assert (found.body, found.media_type) == (encoded(request, page).body, "application/json")
    assert steps >= 2 * len(page.items) * STEPS_BETWEEN
    assert len(pace.said) >= 2 * len(page.items), "in turn with the other large work of the process"


async def test_a_list_of_groups_is_made_some_hundreds_at_a_time() -> None:
    """A run may have 100,000 in the archive."""
    places = [
        GroupPlace(group_id=f"g-{number}", purpose="train", state="used", size=8, ended=8, grants=1)
        for number in range(2 * LISTED_AT_ONCE + 1)
    ]

    async def groups(run_id: str | None) -> list[GroupPlace]:
        return places if run_id == "r" else []

    for run_id, chunks in (("r", 3), (None, 0)):
        pace = Noted()
        request = asked(pace, store=SimpleNamespace(runs=SimpleNamespace(groups=groups)))
        found = await list_groups(request, run_id)
        whole = GroupList(items=await groups(run_id))
        assert (found.body, found.media_type) == (encoded(request, whole).body, "application/json")
        assert len(pace.said) == 2 * chunks + 1


async def test_the_states_of_runs_in_a_list_are_read_some_at_a_time_and_those_together() -> None:
    """Over Redis each is a round trip of its own, if it is read alone; in memory nothing else goes on meanwhile."""
    newest = [(f"r-{number}", float(number)) for number in range(2 * VIEWED_AT_ONCE + 1)]
    reading, most = 0, 0

    async def first(limit: int) -> list[tuple[str, float]]:
        return newest[:limit]

    async def view(run_id: str, *, ledger: bool) -> RunView:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0)
        reading -= 1
        return RunView(run_id=run_id)

    pace = Noted()
    found = await list_runs(asked(pace, store=SimpleNamespace(runs=SimpleNamespace(newest=first, view=view))), 1000)
    shown = RunList.model_validate_json(bytes(found.body)).items
    assert [(run.run_id, run.last_group_at) for run in shown] == newest
    assert (most, len(pace.said)) == (VIEWED_AT_ONCE, 4)


async def test_a_page_of_steps_is_made_some_at_a_time() -> None:
    """A viewer reads 1,000 at once."""
    held = [TrainingStep(step=number, values={"loss": 0.5}) for number in range(2 * STEPS_AT_ONCE + 2)]

    async def steps(run_id: str, *, start: int, limit: int) -> list[TrainingStep]:
        return held[start:][:limit]

    pace = Noted()
    request = asked(pace, store=SimpleNamespace(runs=SimpleNamespace(steps=steps)))
    found = await read_steps(request, "r", limit=2 * STEPS_AT_ONCE + 1)
    whole = TrainingStepPage(items=held[:-1], next_start=held[-1].step)
    assert found.body == encoded(request, whole).body
    assert len(pace.said) == 2 * 3 + 1


class Replying:
    """A Redis link that has an answer to everything. most: commands that were sent together."""

    def __init__(self, replies: list[bytes]) -> None:
        self.replies, self.most, self.sent = replies, 0, 0
        self.client = self

    async def ask(self, *commands: tuple[Any, ...]) -> list[list[bytes]]:
        return [self.replies]

    def pipeline(self, transaction: bool) -> Any:
        self.sent = 0
        return self

    def hgetall(self, key: str) -> None:
        self.sent += 1

    get = hgetall

    async def execute(self) -> list[Any]:
        self.most = max(self.most, self.sent)
        return [{b"status": b"open"}, b"document"] * (self.sent // 2)

    async def call(self, made: Awaitable[list[Any]]) -> list[Any]:
        return await made


async def test_steps_are_read_from_redis_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 of them, each of a hundred numbers, take 30 ms."""
    others, at_once = 0, Counter[int]()

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    def noted(kind: type[TrainingStep], raw: bytes) -> TrainingStep:
        at_once[others] += 1
        return read_json(kind, raw)

    monkeypatch.setattr(redis_runs, "read_json", noted)
    raw = [TrainingStep(step=number).model_dump_json().encode() for number in range(1001)]
    link: Any = Replying(raw)
    streaming = asyncio.create_task(other())
    found = await RedisRuns(link, link, link, 1000, time.time).steps("r", start=0, limit=1001)
    streaming.cancel()
    assert [step.step for step in found] == list(range(1001))
    assert max(at_once.values()) <= redis_runs.STEPS_AT_ONCE


async def test_sessions_are_read_from_redis_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large group, for its lease."""
    monkeypatch.setattr(lists, "session_of", lambda trial_id, *_: trial_id)
    monkeypatch.setattr(lists, "head_from_hash", lambda fields: None)
    link: Any = Replying([])
    names: Any = [f"g.{number}" for number in range(1001)]
    assert await RedisLists(link, link, link, link).sessions(names) == names
    assert link.most == 2 * lists.RECORDS_AT_ONCE


def test_pages_are_made_in_turn_with_all_other_large_work_of_the_application() -> None:
    state = create_app(ProxySettings(), MemoryStore()).state
    assert state.services.pace is state.turns.pace
