"""Images through the whole product to an upstream that takes them, in each dialect's own shape; refused where none does."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from tests.integration.upstream.conftest import sdk
from tests.integration.upstream.seeing import Seeing, seeing
from tests.support.programs.stack import Stack, running

PIXELS = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
URL = "data:image/png;base64," + base64.b64encode(PIXELS).decode()
OTHER = "data:image/png;base64," + base64.b64encode(PIXELS[::-1]).decode()
SHOWN = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Seeing]:
    with seeing() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def stack(upstream: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    words = ["--upstream", "openai/eyes", "--api-base", upstream.url, "--api-key", "sk-x", "--upstream-images", "on"]
    with running(tmp_path_factory.mktemp("front"), None, proxy=words) as stack:
        stack.wait_for_model()
        yield stack


def images_of(body: dict[str, Any]) -> list[str]:
    parts = [
        part for message in body["messages"] if isinstance(message.get("content"), list) for part in message["content"]
    ]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_a_conversation_with_an_image_goes_on_and_the_image_is_on_record_once(stack: Stack, upstream: Seeing) -> None:
    client = sdk(stack, "chat")
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, SHOWN]}]
    first = client.chat.completions.create(model="m", messages=messages)
    assert first.choices[0].message.content == "I see 1" and first.usage and first.usage.prompt_tokens == 107
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "user", "content": [{"type": "text", "text": "and again?"}, SHOWN]}]
    second = client.chat.completions.create(model="m", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in second if chunk.choices) == "I see 2"
    assert images_of(upstream.requests[-1]) == [URL, URL]
    one, two = stack.turns("chat")
    assert two["parent_id"] == one["turn_id"] and two["fork_reason"] is None
    assert one["messages"][0]["content"][1] == two["messages"][0]["content"][1] == SHOWN
    assert stack.get("/sessions/chat")["marks"] == ["text_only"]


def test_another_image_is_another_history(stack: Stack) -> None:
    client = sdk(stack, "other")
    asked: list[Any] = [{"role": "user", "content": [SHOWN]}]
    said = client.chat.completions.create(model="m", messages=asked).choices[0].message.content
    rest = [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    elsewhere: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": OTHER}}]}]
    client.chat.completions.create(model="m", messages=[*elsewhere, *rest])
    client.chat.completions.create(model="m", messages=[*asked, *rest])
    first, changed, same = stack.turns("other")
    assert changed["parent_id"] is None and changed["fork_reason"] in ("new_conversation", "history_rewritten")
    assert same["parent_id"] == first["turn_id"]


def test_messages_takes_images_in_results_of_tools_too(stack: Stack, upstream: Seeing) -> None:
    client = anthropic.Anthropic(base_url=f"{stack.url}/messages", api_key="x", max_retries=0)
    shown: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]},
    }
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result: Any = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "here"}, shown],
    }
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    answer = client.messages.create(
        model="m", max_tokens=20, tools=tools,
        messages=[
            {"role": "user", "content": "look"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )  # fmt: skip
    assert answer.content[0].text == "I see 1"  # type: ignore[union-attr]
    assert [message["role"] for message in upstream.requests[-1]["messages"]] == ["user", "assistant", "tool", "user"]
    assert images_of(upstream.requests[-1]) == [URL]
    counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": [shown]}])
    assert counted.input_tokens > 0
    [turn] = stack.turns("messages")
    assert turn["messages"][2]["content"] == [{"type": "text", "text": "here"}, SHOWN], "on record as it was sent"


def test_responses_takes_images_and_a_stored_conversation_keeps_them(stack: Stack, upstream: Seeing) -> None:
    client = openai.OpenAI(base_url=stack.base_url("responses"), api_key="x", max_retries=0)
    shown: Any = {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "high"}]}
    first = client.responses.create(model="m", input=[shown])
    assert first.output_text == "I see 1"
    second = client.responses.create(model="m", input="and now?", previous_response_id=first.id)
    assert second.output_text == "I see 1" and images_of(upstream.requests[-1]) == [URL]
    assert upstream.requests[-1]["messages"][0]["content"][0]["image_url"]["detail"] == "high"


def test_gemini_takes_images(stack: Stack, upstream: Seeing) -> None:
    options = types.HttpOptions(base_url=f"{stack.url}/gemini")
    client = genai.Client(api_key="x", http_options=options)
    part = types.Part.from_bytes(data=PIXELS, mime_type="image/png")
    answer = client.models.generate_content(model="m", contents=[part, "what is it?"])
    assert answer.text == "I see 1" and images_of(upstream.requests[-1]) == [URL]


def test_a_model_that_takes_none_refuses_it_by_name_and_nothing_is_recorded(front: Stack) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, SHOWN]}]}
    answer = httpx.post(front.base_url("blind") + "/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages.0.content.1.image_url")
    assert "Could not process image: the model takes text only" in error["message"]
    assert httpx.get(f"{front.url}/sessions/blind", timeout=60).status_code == 404
