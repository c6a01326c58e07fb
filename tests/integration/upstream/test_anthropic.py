"""An Anthropic-shaped upstream through LiteLLM: another wire format behind, the same record in front."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from steno_worker.engines.litellm.text import TextEngine
from tests.integration.upstream.conftest import KEY, TOOLS, ask, sdk, text_of
from tests.support.programs.stack import Stack


@pytest.fixture(scope="module")
def front(in_front: Callable[..., Stack]) -> Stack:
    return in_front("anthropic/up", "/claude")


def test_a_streamed_answer_and_its_usage(front: Stack, behind: Stack) -> None:
    chunks = list(
        sdk(front, "plain").chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert text_of(chunks) == "you said hello"
    (turn,) = front.turns("plain")
    upstream = behind.turns("claude")[-1]
    assert upstream["dialect"] == "messages"
    assert turn["prompt_tokens"] == upstream["prompt_tokens"] == chunks[-1].usage.prompt_tokens
    assert turn["upstream_tokens"] == len(upstream["completion_ids"])
    assert front.get("/sessions/plain")["marks"] == ["text_only"]


def test_thinking_is_reasoning(in_front: Callable[..., Stack]) -> None:
    """An upstream of Messages shows it to who asks: LiteLLM makes `thinking` of the effort, for models that it knows to think."""
    front = in_front("anthropic/claude-sonnet-4-5", "/claude")
    message = ask(front, "thinks", "think", reasoning_effort="low").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "thought")


def test_it_is_not_asked_to_think_on_from_calls(in_front: Callable[..., Stack]) -> None:
    """Anthropic answers 400 then: the thinking before the calls would have to come back with its signature."""
    front = in_front("anthropic/claude-sonnet-4-5", "/claude")
    said = ask(front, "goes-on", "look", tools=TOOLS, reasoning_effort="low").json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "red"} for call in said["tool_calls"]]
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "look"}, said, *results],
        "tools": TOOLS,
        "reasoning_effort": "low",
    }
    answer = httpx.post(front.base_url("goes-on") + "/chat/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "seen: red, red"
    assert [turn["options"].get("dropped") for turn in front.turns("goes-on")] == [None, ["reasoning_effort"]]


@pytest.mark.parametrize(
    ("model", "signs"),
    [
        ("anthropic/claude-sonnet-4-5", True),
        ("anthropic/claude-opus-4-6", False),
        ("bedrock/anthropic.claude-sonnet-4-5-20250929-v1:0", True),
        ("bedrock/us.anthropic.claude-opus-4-6-v1", False),
        ("vertex_ai/claude-sonnet-4-5", True),
        ("vertex_ai/claude-opus-4-6", False),
        ("openai/gpt-5", False),
        ("hosted_vllm/claude-distilled", False),
    ],
)
def test_who_signs_its_thinking_is_read_from_litellms_table(model: str, signs: bool) -> None:
    assert TextEngine(model)._signs_thinking == signs


def test_tool_calls_keep_the_upstreams_ids_on_record_and_go_back_by_them(front: Stack, behind: Stack) -> None:
    client = sdk(front, "tools")
    messages: list = [{"role": "user", "content": "look"}]
    first = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "let me look"
    assert [json.loads(call.function.arguments) for call in first.message.tool_calls or ()] == [
        {"at": "this"},
        {"at": "that"},
    ]
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "red"})
    second = client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "seen: red, red"
    one, two = front.turns("tools")
    assert two["parent_id"] == one["turn_id"]
    assert all(own.startswith("toolu_") for own in one["call_ids"].values())
    upstream = behind.turns("claude")[-2:]
    assert upstream[1]["parent_id"] == upstream[0]["turn_id"]


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [("429", 429, "rate_limited"), ("401", 503, "engine_failed"), ("too long", 400, "context_length_exceeded")],
)
def test_its_failures_have_our_words(front: Stack, said: str, status: int, code: str) -> None:
    answer = ask(front, f"fails-{said.replace(' ', '-')}", said)
    assert answer.status_code == status and answer.json()["error"]["code"] == code and KEY not in answer.text


def test_an_agent_of_that_format_is_served_by_an_upstream_of_the_other(in_front: Callable[..., Stack]) -> None:
    """Messages in front, chat behind; tokens are counted, by LiteLLM's tokenizer."""
    front = in_front("openai/up", "/behind/v1")
    base = f"{front.url}/crossed/v1/messages"
    body = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(base, json=body, timeout=60).json()
    assert answer["content"] == [{"type": "text", "text": "you said hello"}] and answer["stop_reason"] == "end_turn"
    counted = httpx.post(base + "/count_tokens", json={"model": "any", "messages": body["messages"]}, timeout=60).json()
    assert counted["input_tokens"] > 0
