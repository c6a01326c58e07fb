"""The official Anthropic SDK against the running proxy, over what the Messages format has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from steno.contracts.errors import ContextOverflow, NoWorker
from steno.contracts.wire.frames import Generate
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

TOOLS: list[Any] = [
    {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]
HI: Any = {"role": "user", "content": "hi"}


def sdk(proxy: Proxy, trial_id: str = "t", **more: Any) -> anthropic.AsyncAnthropic:
    key = more or {"api_key": "none"}
    return anthropic.AsyncAnthropic(base_url=f"{proxy.url}/{trial_id}", max_retries=0, timeout=60, **key)


def agent(request: Generate) -> Say:
    """Calls a tool twice at once, then once, then answers."""
    asked = sum(message["role"] == "assistant" for message in request.job.messages)
    if asked == 0:
        return Say("Two.", reasoning="hm", calls=[("own-1", "f", '{"a": 1.0}'), ("own-2", "f", "{}")])
    return Say("One.", calls=[("own-3", "f", '{"a": 12345678901234567}')]) if asked == 1 else Say("Done.")


@pytest.fixture
async def tools() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(agent)) as found:
        yield found


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
async def test_a_conversation_with_tools_is_one_exact_branch(tools: Proxy, streamed: bool, thinking: bool) -> None:
    """I2, with what the SDK itself makes of our answers as the echo."""
    client = sdk(tools)
    messages: list[Any] = [HI]
    shown: list[str] = []
    while True:
        asked: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": TOOLS, "system": "Be good."}
        if thinking:
            asked["thinking"] = {"type": "adaptive"}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        if answer.stop_reason != "tool_use":
            break
        kept = answer.content
        shown.append(kept[0].type)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in kept]})
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "ok"}]}
            for block in kept
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", "Done.")  # type: ignore[union-attr]
    turns = await tools.turns("t")
    assert shown[0] == ("thinking" if thinking else "text"), "shown to who asked for it; the record has it"
    assert turns[0].reply["reasoning_content"]
    assert [turn.fork_reason for turn in turns] == [None, None, None]
    assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert not any(turn.partial for turn in turns)
    for before, request in zip(turns, tools.engine.requests[1:], strict=False):
        assert request.prefix_ids.endswith(before.new_prompt_ids + before.completion_ids)
    assert turns[0].reply["tool_calls"][1]["id"] == f"toolu_{turns[0].turn_id}_1"
    rendered = tools.engine.requests[1].job.messages
    assert [message["tool_call_id"] for message in rendered if message["role"] == "tool"] == ["own-1", "own-2"]
    assert answer.usage.input_tokens == turns[-1].prompt_tokens
    assert answer.usage.output_tokens == turns[-1].completion_tokens


async def test_everything_that_may_be_asked_for_reaches_the_worker(proxy: Proxy) -> None:
    await sdk(proxy).messages.create(
        model="any-name", max_tokens=64_000, messages=[HI], system=[{"type": "text", "text": "s"}],
        extra_body={"temperature": 0.3, "top_p": 0.9, "top_k": 5},
        stop_sequences=["END"], tools=TOOLS, thinking={"type": "disabled"},
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, metadata={"user_id": "u"},
    )  # fmt: skip
    [request], [turn] = proxy.engine.requests, await proxy.turns("t")
    law = request.job.sampling
    assert (law.temperature, law.top_p, law.top_k, law.stop, law.max_tokens) == (0.3, 0.9, 5, ["END"], 64_000)
    assert (request.job.tool_choice, request.job.parallel_tool_calls) == ("required", False)
    assert request.job.template_kwargs == {"enable_thinking": False, "thinking": False}
    assert (turn.model, turn.dialect, turn.asked["stop_sequences"]) == ("any-name", "messages", ["END"])


async def test_the_beta_client_and_a_base_url_one_level_too_deep(proxy: Proxy) -> None:
    answer = await sdk(proxy).beta.messages.create(
        model="m", max_tokens=9, messages=[HI], betas=["context-1m-2025-08-07"]
    )
    assert answer.content[0].text == "hello"  # type: ignore[union-attr]
    deeper = await proxy.http.post("/t/v1/v1/messages?beta=true", json={"max_tokens": 9, "messages": [HI]})
    assert deeper.json()["content"] == [{"type": "text", "text": "hello"}]
    assert deeper.headers["request-id"] == deeper.headers["x-request-id"]
    higher = await proxy.http.post(
        "/t/messages", json={"max_tokens": 9, "messages": [HI]}
    )  # AI SDK's base URL ends in /v1
    assert higher.json()["content"] == deeper.json()["content"]


async def test_counting_is_answered_by_a_worker_and_never_recorded(proxy: Proxy) -> None:
    counted = await sdk(proxy).messages.count_tokens(model="m", messages=[HI], system="s", tools=TOOLS)
    answer = await sdk(proxy, "other").messages.create(model="m", max_tokens=9, messages=[HI], system="s", tools=TOOLS)
    assert counted.input_tokens == answer.usage.input_tokens
    listed = (await proxy.http.get("/sessions")).json()["items"]
    assert [session["trial_id"] for session in listed] == ["other"]


async def test_models_are_listed_for_this_client_too(proxy: Proxy) -> None:
    [model] = [model async for model in sdk(proxy).models.list()]
    assert (model.id, model.display_name, model.type) == ("parrot", "parrot", "model")
    for found in (model, await sdk(proxy).models.retrieve("claude-any")):
        assert (
            type(found).model_validate_json(found.to_json()).lifecycle == "active"
        )  # all that the SDK's class requires
    with pytest.raises(anthropic.NotFoundError) as caught:
        await sdk(proxy).beta.files.list()
    assert caught.value.type == "not_found_error" and "is not served here" in caught.value.message


@pytest.mark.parametrize("carrier", ["api_key", "auth_token"])
async def test_the_key_of_the_trial_opens_it_from_either_header(carrier: str) -> None:
    async with running(admin_key="admin") as proxy:
        await proxy.http.post("/sessions/t", json={})
        good: Any = {carrier: proxy.agent_key("t")}
        answer = await sdk(proxy, **good).messages.create(model="m", max_tokens=9, messages=[HI])
        assert answer.stop_reason == "end_turn"
        assert (await sdk(proxy, **good).messages.count_tokens(model="m", messages=[HI])).input_tokens > 0
        for key in ("wrong", proxy.agent_key("other"), "admin"):
            for call in (
                sdk(proxy, **{carrier: key}).messages.create(model="m", max_tokens=9, messages=[HI]),
                sdk(proxy, **{carrier: key}).messages.count_tokens(model="m", messages=[HI]),
            ):
                with pytest.raises(anthropic.PermissionDeniedError) as caught:
                    await call
                assert caught.value.body["error"]["type"] == "permission_error"  # type: ignore[index]
                assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]
        bare = await proxy.http.post("/t/v1/messages", json={"messages": [HI]}, headers={"authorization": ""})
        assert (bare.status_code, bare.json()["error"]["type"]) == (401, "authentication_error")


async def test_errors_before_the_first_byte() -> None:
    refusals = iter([
        ContextOverflow("too long", prompt_tokens=300, context_tokens=200), NoWorker("nobody there", retry_after_s=3)
    ])  # fmt: skip
    async with running(ParrotEngine(lambda request: Say(refuse=next(refusals)))) as proxy:
        with pytest.raises(anthropic.BadRequestError) as overflow:
            await sdk(proxy).messages.create(model="m", max_tokens=9, messages=[HI], stream=True)
        assert overflow.value.body["error"] == {  # type: ignore[index]
            "type": "invalid_request_error", "message": "prompt is too long: 300 tokens > 200 maximum"
        }  # fmt: skip
        with pytest.raises(anthropic.InternalServerError) as nobody:
            await sdk(proxy).messages.create(model="m", max_tokens=9, messages=[HI])
        assert nobody.value.status_code == 503 and int(nobody.value.response.headers["retry-after"]) >= 1
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        said = r"messages\.0\.content\.0\.source: Could not process image: the model takes text only"
        with pytest.raises(anthropic.BadRequestError, match=said):
            await sdk(proxy).messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}])


async def test_a_stop_sequence_and_the_token_limit_are_told_apart() -> None:
    async with running(ParrotEngine(lambda request: Say("abcdef"))) as proxy:
        cut = await sdk(proxy).messages.create(model="m", max_tokens=3, messages=[HI])
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")  # type: ignore[union-attr]


async def test_blocks_of_unknown_types_are_dropped_and_counted(proxy: Proxy) -> None:
    content: Any = [{"type": "text", "text": "a"}, {"type": "container_upload", "file_id": "f"}]
    await sdk(proxy).messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    metrics = (await proxy.http.get("/metrics")).text
    assert 'steno_proxy_dropped_items_total{dialect="messages",type="container_upload"}' in metrics
    assert (await proxy.turns("t"))[0].messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_marked_retry_gets_the_same_answer_again(tools: Proxy, streamed: bool) -> None:
    asked: Any = {"model": "m", "max_tokens": 500, "messages": [HI], "tools": TOOLS}
    answers = []
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        if streamed:
            async with sdk(tools).messages.stream(**asked, extra_headers=headers) as stream:
                answers.append(await stream.get_final_message())
        else:
            answers.append(await sdk(tools).messages.create(**asked, extra_headers=headers))
    assert answers[0] == answers[1]
    assert len(await tools.turns("t")) == len(tools.engine.requests) == 1
