"""Arguments that a model samples and no client can hold as they are: the conversation goes on, from the very tokens.

Half a surrogate pair, escaped, is one: a client that reads it writes it again with every request from then on. More than `input`
for a tool of free text is another.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from steno.contracts.wire.frames import Generate
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

HALF = r'{"command":"echo \ud99c x"}'
EXEC: Any = {"type": "custom", "name": "exec", "description": "d"}


def calling(name: str, arguments: str) -> ParrotEngine:
    """Calls once, then answers."""

    def reply(request: Generate) -> Say:
        called = any(message["role"] == "assistant" for message in request.job.messages)
        return Say("Done.") if called else Say("Once.", calls=[("own", name, arguments)])

    return ParrotEngine(reply)


def check_one_branch(turns: list[Any], how: str | None = "call_ids") -> None:
    assert [turn.fork_reason for turn in turns] == [None] * len(turns)
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert turns[1].options.get("echoed_as") == how


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("told", [True, False])
async def test_messages_that_hold_half_a_surrogate_pair_are_taken_and_the_call_in_them_recognised(told: bool) -> None:
    """JavaScript and Python write it escaped. told: the client sends the input back that it was told, in which the arguments are
    text; else the object that was sampled, as it has it from another dialect or an earlier version."""
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    async with running(calling("bash", HALF)) as proxy:
        body: dict[str, Any] = {"max_tokens": 99, "stream": True, "tools": tools}
        said: list[Any] = [{"role": "user", "content": "go"}]
        first = await proxy.http.post("/t/v1/messages", json={**body, "messages": said})
        found = events(first.text)
        [block] = [
            event["content_block"] for event in found if event.get("content_block", {}).get("type") == "tool_use"
        ]
        read = json.loads("".join(event.get("delta", {}).get("partial_json", "") for event in found))
        assert read == {"__unparsedToolInput": HALF}
        block["input"] = read if told else json.loads(HALF)
        said += [
            {"role": "assistant", "content": [{"type": "text", "text": "Once."}, block]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "cut \ud83d"}]},
        ]
        for _ in range(2):
            content = json.dumps({**body, "messages": said})
            assert r"\ud99c" in content
            answer = await proxy.http.post("/t/v1/messages", content=content)
            assert answer.status_code == 200, answer.text
            said += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "again"}]
        turns = await proxy.turns("t", at_least=3)
        check_one_branch(turns, None if told else "call_ids")
        assert turns[0].reply["tool_calls"][0]["function"]["arguments"] == HALF, "what was sampled is what is on record"
        assert turns[1].messages[0]["content"] == "cut \ufffd"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("keeps_ids", [True, False])
@pytest.mark.parametrize(
    ("arguments", "told", "how"),
    [
        ('{"input":"ls\\n","workdir":"/a"}', "ls\n", "call_ids"),
        ('{"patch":"ls"}', '{"patch":"ls"}', "call_ids"),
        (r'{"input":"a\ud83d b"}', "a\ufffd b", "call_ids"),
        ('{"input":"ls"}', "ls", None),
    ],
)
async def test_a_call_of_a_free_text_tool_is_gone_on_from_whatever_its_client_was_told_of_it(
    streamed: bool, keeps_ids: bool, arguments: str, told: str, how: str | None
) -> None:
    async with running(calling("exec", arguments)) as proxy:
        items: list[Any] = [{"role": "user", "content": "go"}]
        body: dict[str, Any] = {"tools": [EXEC], "stream": streamed, "store": False}
        answer = await proxy.http.post("/t/v1/responses", json={**body, "input": items})
        assert answer.status_code == 200, answer.text
        whole = events(answer.text)[-1]["response"] if streamed else answer.json()
        [call] = [item for item in whole["output"] if item["type"] == "custom_tool_call"]
        assert call["input"] == told
        for item in whole["output"]:
            items.append(item if keeps_ids else {key: value for key, value in item.items() if key != "id"})
        items.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"})
        again = await proxy.http.post("/t/v1/responses", json={**body, "input": items})
        assert again.status_code == 200, again.text
        raw = told == arguments and keeps_ids  # the item's id says so
        check_one_branch(await proxy.turns("t", at_least=2), None if raw else how)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/messages", {"max_tokens": 9.0, "messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/responses", {"input": "\ud800"}),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "\ud800"}]}]}),
    ],
)
async def test_half_a_surrogate_pair_is_taken_by_every_route_of_agents(proxy: Proxy, path: str, body: Any) -> None:
    answer = await proxy.http.post(f"/t{path}", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    [turn] = await proxy.turns("t", at_least=1)
    assert "\ufffd" in str(turn.messages)
