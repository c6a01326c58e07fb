"""Responses over a WebSocket, by the official SDK's own transport: the turns, keys, limits and record of `POST`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from steno_proxy.api.agents import generation, response_socket
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.faults.test_deaf import answering, end_session
from tests.integration.http.formats.test_responses_objects import EVENT
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

Event = dict[str, Any]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(lambda request: Say("hello", reasoning="well"))) as found:
        yield found


def opened(
    proxy: Proxy, trial: str = "t", path: str = "/v1/responses", key: str | None = None, **headers: str
) -> connect:
    shown = headers | ({"authorization": f"Bearer {key}"} if key else {})
    return connect(f"{proxy.url.replace('http', 'ws')}/{trial}{path}", additional_headers=shown, max_queue=1)


async def asked(wire: Any, **fields: Any) -> list[Event]:
    """The events of one request, to its last."""
    await wire.send(json.dumps({"type": "response.create", "model": "m"} | fields))
    events: list[Event] = []
    while not events or events[-1]["type"] not in (
        "response.completed", "response.incomplete", "response.failed", "error",
    ):  # fmt: skip
        events.append(json.loads(await wire.recv()))
        EVENT.validate_python(events[-1])
    return events


async def test_the_sdk_asks_one_after_the_other_and_goes_on_from_what_it_has(proxy: Proxy) -> None:
    async with proxy.openai("t").responses.connect() as wire:
        await wire.response.create(model="m", input="one", instructions="be kind")
        await wire.response.create(model="m", input="another")  # waits for the first
        ended = []
        async for event in wire:
            if event.type == "response.completed":
                ended.append(event.response)
                if len(ended) == 2:
                    break
        await wire.response.create(model="m", input="two", previous_response_id=ended[0].id, instructions="be kind")
        kinds = []
        async for event in wire:
            kinds.append(event.type)
            if event.type == "response.completed":
                assert event.response.output_text == "hello" and event.response.previous_response_id == ended[0].id
                break
    async with proxy.openai("u").responses.stream(model="m", input="one") as stream:
        assert [event.type async for event in stream] == kinds  # as over HTTP
    one, another, two = await proxy.turns("t")
    assert [f"resp_{turn.turn_id}" for turn in (one, another)] == [answer.id for answer in ended]
    assert (two.parent_id, len(two.messages)) == (one.turn_id, 1)
    assert {turn.dialect for turn in (one, another, two)} == {"responses"} and two.delivered == two.completion_tokens


async def test_what_is_refused_is_an_event_and_the_socket_goes_on(proxy: Proxy) -> None:
    async with opened(proxy) as wire:
        for fields, status, code, param in (
            ({"type": "response.append", "input": "x"}, 400, "invalid_request", "type"),
            ({"type": None}, 400, "invalid_request", "type"),
            ({"input": []}, 400, "invalid_request", "input"),
            ({"input": "x", "background": True}, 400, "invalid_request", "background"),
            (
                {"input": "x", "previous_response_id": "resp_x"},
                400,
                "previous_response_not_found",
                "previous_response_id",
            ),
        ):
            [event] = await asked(wire, **fields)
            assert (event["type"], event["status"], event["code"], event["param"]) == ("error", status, code, param)
            assert event["error"]["code"] == code and event["message"] == event["error"]["message"]
        assert (await asked(wire, generate=False, input="x"))[-1]["response"]["id"] == ""  # opened early: no turn
        await wire.send("no JSON")
        assert json.loads(await wire.recv())["status"] == 400
        assert (await asked(wire, input="x"))[-1]["type"] == "response.completed"
        await end_session(proxy)
        [event] = await asked(wire, input="y")
        assert (event["status"], event["code"]) == (410, "session_closed")
    assert len(await proxy.turns("t")) == 1


async def test_what_is_not_stored_can_be_gone_on_from_on_its_own_socket_until_that_fails(proxy: Proxy) -> None:
    hidden = {"store": False, "instructions": "be kind"}
    async with opened(proxy) as wire:
        first = (await asked(wire, input="one", **hidden))[-1]["response"]["id"]
        second = (await asked(wire, input="two", previous_response_id=first, **hidden))[-1]["response"]["id"]
        turns = await proxy.turns("t")
        assert turns[1].parent_id == turns[0].turn_id
        [event] = await asked(wire, input="three", previous_response_id=first, **hidden)  # not the last any more
        assert event["code"] == "previous_response_not_found"
        output = [{"type": "function_call_output", "call_id": "call_x", "output": "?"}]
        [event] = await asked(wire, input=output, previous_response_id=second, **hidden)
        assert "call_x" in event["message"]
        [event] = await asked(wire, input="three", previous_response_id=second, **hidden)
        assert event["code"] == "previous_response_not_found"
        third = (await asked(wire, input="four", **hidden))[-1]["response"]["id"]
    async with opened(proxy) as other:
        [event] = await asked(other, input="five", previous_response_id=third, **hidden)
        assert event["code"] == "previous_response_not_found"
    assert len(await proxy.turns("t")) == 3


async def test_tools_among_the_items_stay_offered_where_the_conversation_goes_on(proxy: Proxy) -> None:
    """Codex sends all of its tools there, and on a socket only what is new of its items."""
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    last: dict[str, Any] = {}
    async with opened(proxy) as wire:
        for store in (False, False, True, True, False, False):
            said = [{"role": "user", "content": "on"}]
            ended = (await asked(wire, input=said if last else [item, *said], store=store, **last))[-1]["response"]
            last = {"previous_response_id": ended["id"]}
    turns = await proxy.turns("t")
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [[tool["function"]["name"] for tool in turn.tools] for turn in turns] == [["f"]] * 6


async def test_who_leaves_in_the_middle_ends_the_turn() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("hello", gates={2: gate}))) as proxy:
        async with opened(proxy) as wire:
            await wire.send(json.dumps({"type": "response.create", "input": "x"}))
            await wire.send(json.dumps({"type": "response.create", "input": "never asked"}))
            while json.loads(await wire.recv())["type"] != "response.output_text.delta":
                pass
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", at_least=1)
        assert turn.partial and turn.finish_reason == "cancelled" and 0 < turn.completion_tokens < 5
        await until(lambda: answering() == 0)
        assert len(proxy.engine.requests) == 1


async def test_a_key_opens_its_own_trial_and_is_looked_at_for_each_request() -> None:
    async with running(admin_key="admin") as proxy:
        key = (await proxy.http.post("/sessions/t")).json()["api_key"]
        await proxy.http.post("/sessions/u")
        for trial, shown, status in (("t", None, 401), ("t", "wrong", 403), ("t", "admin", 403), ("u", key, 403)):
            with pytest.raises(InvalidStatus) as refused:
                await opened(proxy, trial, key=shown)
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["message"]
        async with opened(proxy, key=key, origin="http://a.page") as wire:  # as by HTTP: its key is what no page has
            assert (await asked(wire, input="x"))[-1]["type"] == "response.completed"
            await proxy.http.post("/sessions/t/rotate-key")
            [event] = await asked(wire, input="y")
            assert (event["status"], event["error"]["type"]) == (403, "invalid_request_error")
        assert len(await proxy.turns("t")) == 1


async def test_what_is_no_socket_says_so_and_no_page_gets_one_without_keys(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial, path in (("t", "/v1/realtime"), ("t", "/v1/chat/completions"), ("sessions", "/t"), ("v1", "/responses")):
        with pytest.raises(InvalidStatus) as refused:
            await opened(proxy, trial, path)
        assert refused.value.response.status_code == 404
        assert "/v1/responses" in json.loads(refused.value.response.body)["error"]["message"]
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        with pytest.raises(InvalidStatus) as refused:
            await opened(proxy, **headers)
        assert refused.value.response.status_code == 403
    async with opened(proxy, path="/responses", origin=proxy.url) as wire:  # a base URL without its version
        assert (await asked(wire, input="x"))[-1]["type"] == "response.completed"
        monkeypatch.setattr(response_socket, "MOST_SOCKETS", 1)
        with pytest.raises(InvalidStatus) as refused:
            await opened(proxy)
        assert refused.value.response.status_code == 429
    await until(lambda: answering() == 0)
    async with opened(proxy) as wire:
        assert (await asked(wire, input="x"))[-1]["type"] == "response.completed"


async def test_messages_are_bounded_as_bodies_are() -> None:
    limits = {"max_body_bytes": 2 * 2**20, "trial_inflight_bytes": 2**20}
    async with running(ParrotEngine(context_tokens=2**20), **limits) as proxy:
        for size, pieces in ((2**20 + 1, 1), (3 * 2**20, 1), (9000, 9000)):
            async with opened(proxy) as wire:
                body = json.dumps({"type": "response.create", "input": "x" * size})
                step = -(-len(body) // pieces)
                with pytest.raises(ConnectionClosed):
                    await wire.send([body[i : i + step] for i in range(0, len(body), step)] if pieces > 1 else body)
                    event = json.loads(await wire.recv())
                    assert event["type"] == "error" and event["status"] in (413, 429)
                    await wire.recv()
        async with opened(proxy) as wire:
            assert (await asked(wire, input="x" * 600_000))[-1]["type"] == "response.completed"
            assert (await asked(wire, input="y" * 600_000))[-1]["type"] == "response.completed"  # room was given back
        assert len(await proxy.turns("t")) == 2


async def test_who_reads_nothing_holds_up_the_turn_and_keeps_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LAST_WORDS_S", 0.5)
    async with running(ParrotEngine()) as proxy:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", proxy.port))
            async with connect(f"ws://127.0.0.1:{proxy.port}/t/v1/responses", sock=raw, max_queue=1) as wire:
                large = {
                    "a": "x" * 2**23
                }  # said again by each event of the response: more than what lies between takes
                await wire.send(json.dumps({"type": "response.create", "input": "x", "metadata": large}))
                await until(stuck)
                assert not any(turn.finish_reason == "stop" for turn in await proxy.turns("t"))
                await end_session(proxy)
                await until(lambda: answering() == 0)
                wire.transport.abort()
        [turn] = await proxy.turns("t")
        assert turn.partial


def stuck() -> bool:
    """Whether an agent's socket can't be written to now."""
    return any({"_tell", "wait"} <= set(names) for names in map(_names, asyncio.all_tasks()))


def _names(task: asyncio.Task[Any]) -> list[str]:
    names, inner = [], task.get_coro()
    while inner is not None:
        names.append(getattr(inner, "__name__", ""))
        inner = getattr(inner, "cr_await", None)
    return names
