"""The official OpenAI SDK over every field it has, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say, drawn

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}
USER: Any = {"role": "user", "content": "hi"}


def script(request: Any) -> Say:
    if request.job.tools and request.job.messages[-1]["role"] != "tool" and request.job.tool_choice != "none":
        return Say("let me see", reasoning="hm", calls=[("", "f", '{"a": 1}'), ("", "f", '{"a": 2}')])
    if not request.job.messages:
        return Say("wellhello")
    return Say("hello", reasoning="well")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(script)) as found:
        yield found


EVERYTHING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"5": 1}, "seed": 7,
    "stop": ["\n\n"], "max_completion_tokens": 50, "n": 1, "logprobs": True, "top_logprobs": 2, "user": "u",
    "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "reasoning_effort": "low", "service_tier": "auto", "store": False, "metadata": {"a": "b"},
    "extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "chat_template_kwargs": {"enable_thinking": True}},
}  # fmt: skip


async def test_every_field_not_streamed(proxy: Proxy) -> None:
    answer = await proxy.openai("t").chat.completions.create(model="gpt-x", messages=[USER], **EVERYTHING)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "let me see"
    assert choice.message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"a": 1}', '{"a": 2}']  # type: ignore[union-attr]
    assert choice.logprobs and len(choice.logprobs.content or []) == answer.usage.completion_tokens  # type: ignore[union-attr]
    assert len(choice.logprobs.content[0].top_logprobs) == 2  # type: ignore[index]
    assert answer.model == "gpt-x" and answer.object == "chat.completion"
    [job] = [request.job for request in proxy.engine.requests]
    assert (job.sampling.top_k, job.sampling.seed, job.sampling.max_tokens) == (3, 7, 50)
    assert job.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}


async def test_both_names_of_reasoning_come_back_as_one_conversation() -> None:
    """`chat_reasoning: both`, and a client that sends back whatever it got."""
    async with running(ParrotEngine(script), chat_reasoning="both") as proxy:
        client = proxy.openai("t").chat.completions
        answer = await client.create(model="gpt-x", messages=[USER], tools=[TOOL])
        said = answer.choices[0].message.model_dump(exclude_none=True)
        assert said["reasoning"] == said["reasoning_content"] == "hm"
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in said["tool_calls"]]
        stream = await client.create(model="gpt-x", messages=[USER, said, *results], tools=[TOOL], stream=True)
        deltas = [choice.delta.model_dump() async for chunk in stream for choice in chunk.choices]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "well"
        assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]
        first, second = await proxy.turns("t")
        assert (second.parent_id, second.fork_reason) == (first.turn_id, None)
        assert "echoed_as" not in second.options


async def test_every_field_streamed_adds_up_to_the_same(proxy: Proxy) -> None:
    client = proxy.openai("t").chat.completions
    stream = await client.create(
        model="gpt-x", messages=[USER], stream=True, stream_options={"include_usage": True}, **EVERYTHING
    )
    text, reasoning, logprobs, reason, usage = "", "", 0, None, None
    calls: dict[int, dict[str, str]] = {}
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            logprobs += len(choice.logprobs.content or []) if choice.logprobs else 0
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.id or ""
                call["name"] += piece.function.name or "" if piece.function else ""
                call["arguments"] += piece.function.arguments or "" if piece.function else ""
    assert (text, reasoning, reason) == ("let me see", "hm", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [("f", '{"a": 1}'), ("f", '{"a": 2}')]
    assert usage and logprobs == usage.completion_tokens
    [turn] = await proxy.turns("t")
    assert [call["id"] for call in calls.values()] == [call["id"] for call in turn.reply["tool_calls"]]


async def test_a_tool_conversation_with_the_sdks_own_objects_continues(proxy: Proxy) -> None:
    """I2: the echo goes through the SDK's models, which add nulls and fields of their own."""
    client = proxy.openai("t").chat.completions
    messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, USER]
    for _ in range(3):
        message = (await client.create(model="m", messages=messages, tools=[TOOL])).choices[0].message
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "ok"}]}
            for call in message.tool_calls or []
        ]
        if not message.tool_calls:
            messages.append({"role": "user", "content": "again"})
    turns = await proxy.turns("t")
    assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert [turn.fork_reason for turn in turns] == [None, None, None]


@pytest.mark.parametrize("choice", ["none", "required", {"type": "function", "function": {"name": "f"}}])
async def test_tool_choices_reach_the_worker(proxy: Proxy, choice: Any) -> None:
    await proxy.openai("t").chat.completions.create(model="m", messages=[USER], tools=[TOOL], tool_choice=choice)
    expected = choice if isinstance(choice, str) else "function:f"
    assert proxy.engine.requests[0].job.tool_choice == expected


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_response_formats_reach_the_worker(proxy: Proxy, kind: str) -> None:
    asked: Any = {"type": kind}
    if kind == "json_schema":
        asked["json_schema"] = {"name": "n", "schema": {"type": "object"}, "strict": True}
    await proxy.openai("t").chat.completions.create(model="m", messages=[USER], response_format=asked)
    assert proxy.engine.requests[0].job.response_format.type == kind


async def test_completions_streamed_and_not(proxy: Proxy) -> None:
    client = proxy.openai("t").completions
    answer = await client.create(model="m", prompt="say", logprobs=1, max_tokens=4)
    assert answer.choices[0].text == "well" and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.token_logprobs == drawn("t", len("say"), 4)
    stream = await client.create(model="m", prompt=[1, 2, 3], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "wellhello"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models_are_listed(proxy: Proxy) -> None:
    client = proxy.openai("t")
    assert [model.id async for model in client.models.list()] == ["parrot"]
    assert (await client.models.retrieve("parrot")).id == "parrot"
    context = (await client.models.retrieve("parrot")).max_model_len  # type: ignore[attr-defined]
    for name in ("gpt-4o", "org/some model/8b"):  # a turn that asks for it is served too
        found = await client.models.retrieve(name)
        assert (found.id, found.max_model_len) == (name, context)  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="longer than 512 characters"):
        await client.models.retrieve("x" * 513)


async def test_errors_are_the_sdks_own(proxy: Proxy) -> None:
    client = proxy.openai("t").chat.completions
    picture: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.create(model="m", messages=picture)
    assert caught.value.param == "messages.0.content.0.image_url"  # type: ignore[attr-defined]
    assert caught.value.request_id


@pytest.mark.parametrize("base", ["/t/v1/v1", "/t", "/t/", "/t/v1//"])
async def test_a_base_url_one_level_too_deep_or_too_high_works(proxy: Proxy, base: str) -> None:
    client = openai.AsyncOpenAI(base_url=proxy.url + base, api_key="x", max_retries=0)
    assert (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message.content == "hello"
    answer = await client.responses.create(model="m", input="hi")
    assert (await client.responses.retrieve(answer.id)).output_text == "hello"
    assert [model.id async for model in client.models.list()] == ["parrot"]
    assert len(await proxy.turns("t", 2)) == 2


async def test_what_is_not_served_is_refused_by_its_name(proxy: Proxy) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /t/v1/embeddings is not served here"):
        await proxy.openai("t").embeddings.create(model="m", input="x")


@pytest.mark.parametrize("base", ["", "/", "/v1"])
async def test_a_base_url_without_a_trial_is_told_so(proxy: Proxy, base: str) -> None:
    client = openai.AsyncOpenAI(base_url=proxy.url + base, api_key="x", max_retries=0)
    for call in (
        client.chat.completions.create(model="m", messages=[USER]),
        client.completions.create(model="m", prompt="x"),
        client.responses.create(model="m", input="x"),
        client.responses.retrieve("resp_x"),
        client.models.retrieve("m"),
    ):
        with pytest.raises(openai.NotFoundError, match="the path has no trial id"):
            await call
    with pytest.raises(openai.NotFoundError, match="the path has no trial id"):
        await client.models.list()


async def test_a_trial_named_like_a_route_is_still_a_trial(proxy: Proxy) -> None:
    await proxy.openai("chat").completions.create(model="m", prompt="x")
    with pytest.raises(openai.NotFoundError, match="POST /chat/v1/embeddings is not served here"):
        await proxy.openai("chat").embeddings.create(model="m", input="x")


async def test_a_session_named_like_a_route_is_still_a_session(proxy: Proxy) -> None:
    """`/sessions/models` is no spelling of an agent's route."""
    await proxy.openai("models").chat.completions.create(model="m", messages=[USER])
    assert (await proxy.http.get("/sessions/models")).json()["trial_id"] == "models"
