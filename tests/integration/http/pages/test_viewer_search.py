"""`GET /ui/sessions`: filters and the search in texts, over both stores; a search that takes long says how far it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.records import Session
from steno_proxy.api.control import search
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ObjectStorage
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import RedisServer
from tests.support.records.shown_sessions import filled, made_turn, record, straight


@pytest.fixture(params=["memory", "redis"])
async def proxy(request: pytest.FixtureRequest) -> AsyncIterator[Proxy]:
    server = RedisServer() if request.param == "redis" else None
    where = {"redis_url": server.url, "archive": "off"} if server else {}
    try:
        async with running(worker=False, **where) as found:
            await filled(found.store, groups=3)
            yield found
    finally:
        if server:
            server.close()


async def found(proxy: Proxy, **query: Any) -> list[str]:
    """All of them, unless there is a limit: one call looks for two seconds, which is not long on a busy machine."""
    trials: list[str] = []
    while True:
        answer = await proxy.http.get("/ui/sessions", params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        trials += [session["trial_id"] for session in page["items"]]
        if page["next_cursor"] is None or "limit" in query:
            return trials
        query["cursor"] = page["next_cursor"]


async def test_each_filter_leaves_what_matches_newest_first(proxy: Proxy) -> None:
    assert len(await found(proxy)) == 13
    assert (await found(proxy, limit=1)) == ["by-hand"]
    assert await found(proxy, agent="claude-code") == ["by-hand"]
    assert sorted(await found(proxy, end_reason="timeout")) == ["parser-00.3", "parser-01.3", "parser-02.3"]
    assert sorted(await found(proxy, min_reward=1, group_id="parser-01")) == ["parser-01.0"]
    assert sorted(await found(proxy, max_reward=0.1, run_id="fix-the-parser")) == [
        "parser-00.2",
        "parser-01.2",
        "parser-02.2",
    ]
    assert await found(proxy, mark="synthetic") == []
    await proxy.store.add_marks("parser-00.1", ["synthetic"])
    assert await found(proxy, mark="synthetic") == ["parser-00.1"]
    assert await found(proxy, run_id="another") == []


async def test_a_text_is_found_in_what_was_said_to_and_by_the_policy(proxy: Proxy) -> None:
    assert sorted(await found(proxy, text="TRAILING commas in the PARSER")) == [
        "parser-00.0",
        "parser-01.0",
        "parser-02.0",
    ]
    assert len(await found(proxy, text="the lexer drops the last token")) >= 1, "thinking"
    assert len(await found(proxy, text="def rule_7(tokens)")) == 13, "what a tool said"
    assert await found(proxy, text="by-HAND") == ["by-hand"]
    long = [{"role": "user", "content": "x" * 1_000_000 + " a NEEDLE"}]
    session = Session(trial_id="long", created_at=1.0, updated_at=1.0)
    await record(proxy.store, session, [made_turn(1, 0, None, 1.0, messages=long)])
    assert await found(proxy, text="a needle") == ["long"], "a line of a megabyte"
    assert await found(proxy, text="nobody said this") == []
    assert await found(proxy, text="reasoning") == [], "names of fields are not what was said"


async def test_what_was_said_in_archived_sessions_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer()
    try:
        async with running(worker=False, redis_url=server.url, archive=str(tmp_path)) as proxy:
            await filled(proxy.store, groups=1)
            for number in range(4):
                await proxy.store.delete(f"parser-00.{number}", now=time.time(), tombstone_s=60.0)
            began = time.time() - 900
            session = Session(trial_id="old", created_at=began, updated_at=began, metadata={"agent": "pi"})
            await record(proxy.store, session, straight(3, 6, began))
            end = {"reward": 1.0, "end_reason": "completed", "metrics": {}}
            await proxy.store.complete("old", status="completed", now=began + 60, **end)
            archiver = Archiver(proxy.store, ObjectStorage(str(tmp_path)))
            async with asyncio.timeout(60):  # while the proxy's own archives, nobody else does
                while not await archiver.round(now=time.time(), retention_s=60.0):
                    await asyncio.sleep(0.05)
            assert await found(proxy, text="def rule_7(tokens)") == ["by-hand", "old"]
            assert await found(proxy, text="def rule_7(tokens)", agent="pi") == ["old"]
            assert await found(proxy, text="nobody said this") == []
            for path in tmp_path.rglob("*"):
                if path.is_file():
                    path.write_bytes(b"spoilt")
            monkeypatch.setattr(search, "LOOK_S", 60.0)
            page = (await proxy.http.get("/ui/sessions", params={"text": "def rule_7(tokens)"})).json()
            assert [session["trial_id"] for session in page["items"]] == ["by-hand"] and page["unreadable"] == ["old"]
    finally:
        server.close()


async def test_a_session_that_is_deleted_while_it_is_searched_is_not_said_to_be_unreadable(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = proxy.store.conversation

    async def too_late(trial_id: str, numbers: Any) -> Any:
        await proxy.store.delete(trial_id, now=time.time(), tombstone_s=60.0)
        return await conversation(trial_id, numbers)

    monkeypatch.setattr(proxy.store, "conversation", too_late)
    monkeypatch.setattr(search, "LOOK_S", 60.0)
    page = (await proxy.http.get("/ui/sessions", params={"text": "def rule_7(tokens)"})).json()
    assert (page["items"], page["unreadable"]) == ([], [])


async def test_a_search_that_takes_long_says_how_far_it_came_and_goes_on(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LOOK_S", 0.0)
    seen: list[str] = []
    cursor, calls = None, 0
    while True:
        query: dict[str, Any] = {"text": "def rule_7(tokens)"} | ({"cursor": cursor} if cursor else {})
        page = (await proxy.http.get("/ui/sessions", params=query)).json()
        assert page["total"] == 13 and page["searched"] <= 1
        seen += [session["trial_id"] for session in page["items"]]
        cursor, calls = page["next_cursor"], calls + 1
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 13 and calls == 14


async def test_what_is_no_filter_is_refused_by_name(proxy: Proxy) -> None:
    for query, field in (
        ({"text": "x"}, "text"),
        ({"rewrd": "1"}, "rewrd"),
        ({"min_reward": "nan"}, "min_reward"),
        ({"cursor": "?"}, "cursor"),
    ):
        answer = await proxy.http.get("/ui/sessions", params=query)
        assert answer.status_code == 400 and answer.json()["error"]["field"] == field, answer.text
