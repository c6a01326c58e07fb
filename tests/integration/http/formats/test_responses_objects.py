"""Response objects, their events and the lists around them, held to the official SDK's own types (all that these require, of the
right kind) and to what Open Responses requires of a response; compaction and the calls on stored responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPEN_RESPONSES = frozenset(
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error tools "
    "tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs temperature "
    "reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata safety_identifier "
    "prompt_cache_key".split()
)
FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "c", "description": "free text"}
SPACE = {"type": "namespace", "name": "space", "description": "of tools", "tools": [FUNCTION | {"name": "g"}]}
BODY: dict[str, Any] = {
    "model": "m", "input": "hi", "instructions": "be kind", "tools": [FUNCTION, CUSTOM, SPACE], "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "max_tool_calls": 3, "prompt_cache_key": "k", "safety_identifier": "s", "user": "u",
    "metadata": {"a": "b"}, "temperature": 0.5,
}  # fmt: skip


def script(request: Any) -> Say:
    last = request.job.messages[-1]
    if "summary" in str(last["content"]):
        return Say("they said hi", reasoning="what was it?")
    if request.job.tools and last["role"] != "tool":
        calls = [("1", "f", '{"a": 1}'), ("2", "c", '{"input": "ls"}'), ("3", "space__g", "{}")]
        return Say("let me see", reasoning="hm", calls=calls)
    if last["content"] == "go on and on":
        return Say("and on", finish="length")
    if last["content"] == "fail":
        return Say("almost there", fail_after=3)
    return Say("hello", reasoning="well")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(script)) as found:
        yield found


async def asked(proxy: Proxy, **body: Any) -> dict[str, Any]:
    answer = await proxy.http.post("/t/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def streamed(proxy: Proxy, **body: Any) -> list[dict[str, Any]]:
    answer = await proxy.http.post("/t/v1/responses", json=body | {"stream": True})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def check_response(body: dict[str, Any]) -> None:
    assert body.keys() >= OPEN_RESPONSES
    Response.model_validate(body)
    for tool in body["tools"]:
        for function in tool.get("tools", [tool]):
            if function["type"] == "function":
                assert function.keys() >= {"name", "description", "parameters", "strict"}


async def test_what_is_answered_is_of_the_types_that_clients_have(proxy: Proxy) -> None:
    whole = await asked(proxy, **BODY)
    check_response(whole)
    assert {name: whole[name] for name in BODY if name not in ("input", "tools")} == {
        name: value for name, value in BODY.items() if name not in ("input", "tools")
    }
    assert [tool["strict"] for tool in (whole["tools"][0], whole["tools"][2]["tools"][0])] == [False, False]
    assert whole["created_at"] <= whole["completed_at"] <= whole["created_at"] + 60
    stored = (await proxy.http.get(f"/t/v1/responses/{whole['id']}")).json()
    check_response(stored)
    differs = {name for name in whole if whole[name] != stored[name]}
    assert differs <= {"tools", "output"}  # a custom tool's parameters, the namespace's description; log-probabilities
    plain = await asked(proxy, model="m", input="hi")
    check_response(plain)
    assert (plain["presence_penalty"], plain["frequency_penalty"], plain["max_tool_calls"]) == (0, 0, None)


@pytest.mark.parametrize(
    "more, ends",
    [
        (BODY, "completed"),
        (BODY | {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}, "completed"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, "completed"),
        ({"input": "go on and on"}, "incomplete"),
        ({"input": "fail"}, "failed"),
    ],
)
async def test_so_is_every_event(proxy: Proxy, more: dict[str, Any], ends: str) -> None:
    events = await streamed(proxy, **({"model": "m", "input": "hi"} | more))
    assert events[-1]["type"] == f"response.{ends}"
    for event in events:
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
        if "response" in event:
            check_response(event["response"])
            assert (event["response"]["completed_at"] is not None) == (event["type"] == "response.completed")


async def test_a_stored_response_lists_what_it_was_an_answer_to(proxy: Proxy) -> None:
    first = await asked(proxy, **BODY)
    image = {"role": "user", "content": [{"type": "input_text", "text": "see"}]}
    outputs = [
        {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "one"},
        {"type": "custom_tool_call_output", "call_id": first["output"][3]["call_id"], "output": "two"},
    ]
    second = await asked(proxy, **(BODY | {"input": [*outputs, image], "previous_response_id": first["id"]}))
    client = proxy.openai("t").responses
    forwards = [item async for item in client.input_items.list(second["id"], order="asc", limit=2)]
    assert [item.type for item in forwards] == [
        "message", "reasoning", "message", "function_call", "custom_tool_call", "function_call", "function_call_output",
        "custom_tool_call_output", "message",
    ]  # fmt: skip
    assert (forwards[5].name, forwards[5].namespace, forwards[4].input) == ("g", "space", "ls")
    backwards = (await proxy.http.get(f"/t/v1/responses/{second['id']}/input_items")).json()
    ResponseItemList.model_validate(backwards)
    assert [item["id"] for item in backwards["data"]] == [item.id for item in reversed(forwards)]
    assert not backwards["has_more"]
    for query, field in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
        refused = await proxy.http.get(f"/t/v1/responses/{second['id']}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    again = await asked(proxy, model="m", input=[item.to_dict() for item in forwards], tools=BODY["tools"])
    assert again["status"] == "completed"  # what is listed can be asked again


async def test_only_what_runs_in_the_background_can_be_cancelled_and_nothing_does(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    done = await client.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.cancel(done.id)
    hidden = await client.create(model="m", input="hi", store=False)
    for response_id in ("resp_000000000000", "nothing", hidden.id):
        with pytest.raises(openai.NotFoundError, match=response_id):
            await client.cancel(response_id)
        with pytest.raises(openai.NotFoundError, match=response_id):
            await client.input_items.list(response_id)


async def test_a_conversation_is_made_short_by_the_model_and_goes_on_from_there(proxy: Proxy) -> None:
    client = proxy.openai("t").responses
    first = await client.create(model="m", input="hi", instructions="be kind")
    compacted = await client.compact(model="m", previous_response_id=first.id, instructions="be kind")
    CompactedResponse.model_validate(compacted.to_dict())
    assert [item.type for item in compacted.output] == ["compaction"]
    turns = await proxy.turns("t")
    assert turns[1].parent_id == turns[0].turn_id and turns[1].reply["content"] == "they said hi"
    assert compacted.id == f"resp_{turns[1].turn_id}" and compacted.usage.output_tokens == turns[1].completion_tokens
    window: Any = [item.to_dict() for item in compacted.output]
    await client.create(model="m", input=[*window, {"role": "user", "content": "and now?"}], store=False)
    said = proxy.engine.requests[-1].job.messages
    assert [message["role"] for message in said] == ["user", "user"]
    assert said[0]["content"].endswith("they said hi") and said[1]["content"] == "and now?"
    for body, field in (({"input": "hi"}, "model"), ({"model": "m"}, "input")):
        refused = await proxy.http.post("/t/v1/responses/compact", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    with pytest.raises(openai.BadRequestError, match="verified"):
        await client.create(model="m", input=[window[0] | {"encrypted_content": "steno1.AAAA"}])


@pytest.mark.parametrize(
    ("path", "streams"), [("/responses/compact", False), ("/responses", False), ("/responses", True)]
)
async def test_a_summary_that_says_nothing_is_a_failure_and_its_retry_is_sampled(path: str, streams: bool) -> None:
    says = iter([Say(reasoning="hm"), Say(" ", reasoning="hm"), Say("they said hi")])
    async with running(ParrotEngine(lambda request: next(says))) as proxy:
        items = [{"role": "user", "content": "hi"}, *([{"type": "compaction_trigger"}] if path == "/responses" else [])]
        for again, status in enumerate((503, 503, 200, 200)):
            answer = await proxy.http.post(
                f"/t/v1{path}",
                json={"model": "m", "input": items} | ({"stream": True} if streams else {}),
                headers={"x-stainless-retry-count": str(again)},
            )
            assert answer.status_code == status, answer.text
        assert answer.text.count('"type":"compaction"') == (3 if streams else 1)
        one, two, three = turns = await proxy.turns("t")
        assert [turn.delivered for turn in turns] == [0, 0, three.completion_tokens]
        assert (two.retry_of, three.retry_of, three.superseded_by) == (one.turn_id, two.turn_id, None)
        assert not any(turn.partial for turn in turns)
