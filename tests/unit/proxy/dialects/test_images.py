"""Images: one canonical part, whatever the dialect that they came in; told by digest, bounded, refused where none can stand."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from steno.contracts.chat import CanonicalRequest, has_images
from steno.contracts.errors import BadRequest
from steno_proxy.dialects import parts
from steno_proxy.dialects.anthropic.dialect import MessagesCount, MessagesDialect
from steno_proxy.dialects.base import Dialect
from steno_proxy.dialects.gemini.dialect import GeminiCount, GeminiDialect
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.responses.dialect import ResponsesCount, ResponsesDialect
from steno_proxy.sessions.messages.normalise import message_digest

PIXELS = base64.b64encode(b"\x89PNG not really").decode()
DATA = f"data:image/png;base64,{PIXELS}"
AT = "https://example.com/cat.png"
CALL = "call_0123456789ab_0"


def image(url: str = DATA) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat() -> dict[str, Any]:
    call = {"id": CALL, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": [text("look"), {"type": "image_url", "image_url": {"url": DATA}}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL, "content": [text("seen"), image(AT)]},
        ]
    }


def messages() -> dict[str, Any]:
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}
    linked = {"type": "image", "source": {"type": "url", "url": AT}}
    result = {"type": "tool_result", "tool_use_id": CALL, "content": [text("seen"), linked]}
    return {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [text("look"), shown | {"cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": CALL, "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }


def responses() -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": DATA, "detail": "auto"}
    result = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": AT}]
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look"}, shown]},
            {"type": "function_call", "call_id": CALL, "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": CALL, "output": result},
        ]
    }


def gemini() -> dict[str, Any]:
    linked = {"fileData": {"mimeType": "image/png", "fileUri": AT}}
    answer = {"id": CALL, "name": "look", "response": {"output": "seen"}, "parts": [linked]}
    return {
        "contents": [
            {"role": "user", "parts": [{"text": "look"}, {"inline_data": {"mime_type": "image/png", "data": PIXELS}}]},
            {"role": "model", "parts": [{"functionCall": {"id": CALL, "name": "look", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": answer}]},
        ]
    }


SHOWN: list[tuple[Dialect, dict[str, Any], list[str]]] = [
    (ChatDialect(), chat(), ["messages.0.content.1.image_url", "messages.2.content.1.image_url"]),
    (MessagesDialect(), messages(), ["messages.0.content.1.source", "messages.2.content.0.content.1.source"]),
    (ResponsesDialect(), responses(), ["input.0.content.1.image_url", "input.2.output.1.image_url"]),
    (GeminiDialect(), gemini(), ["contents.0.parts.1.inlineData.data",
                          "contents.2.parts.0.functionResponse.parts.0.fileData.fileUri"]),
]  # fmt: skip


def parse(dialect: Dialect, body: dict[str, Any]) -> CanonicalRequest:
    return dialect.parse(json.dumps(body).encode())


@pytest.mark.parametrize(("dialect", "body", "paths"), SHOWN, ids=[each[0].name for each in SHOWN])
def test_an_image_is_one_canonical_part_in_every_dialect(
    dialect: Dialect, body: dict[str, Any], paths: list[str]
) -> None:
    asked = parse(dialect, body)
    user, assistant, tool = asked.job.messages
    assert user == {"role": "user", "content": [text("look"), image()]}
    assert tool["content"] == [text("seen"), image(AT)] and tool["tool_call_id"] == CALL
    assert assistant["tool_calls"][0]["id"] == CALL
    assert asked.images == paths and asked.dropped == [] and has_images(asked.job.messages)


def test_the_same_image_has_one_digest_and_another_another() -> None:
    digests = {message_digest(parse(dialect, body).job.messages[0]) for dialect, body, _ in SHOWN}
    assert len(digests) == 1
    other = {"role": "user", "content": [text("look"), image(DATA.replace("image/png", "image/jpeg"))]}
    closer = {
        "role": "user",
        "content": [text("look"), {"type": "image_url", "image_url": {"url": DATA, "detail": "high"}}],
    }
    bare = {"role": "user", "content": "look"}
    assert len({*digests, *map(message_digest, (other, closer, bare))}) == 4


def test_texts_cannot_pass_for_an_image() -> None:
    shown = {"role": "user", "content": [text("a"), image(), text("b")]}
    said = {"role": "user", "content": f"aimage:{DATA}b"}
    assert message_digest(shown) != message_digest(said)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "got '', must be the URL of an image"),
        ("data:,", "must be an image in base64"),
        ("data:text/html;base64,AAAA", "must be an image in base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AAA\n", "not valid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "not valid base64"),
        ("file:///etc/passwd", "must be a data:, https: or http: URL"),
        ("gs://bucket/cat.png", "must be a data:, https: or http: URL"),
        ("https://example.com/" + "x" * 4096, "longer than"),
    ],
)
def test_what_is_no_image_is_refused_by_its_path(url: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        parts.image_part("messages.0.content.0.image_url", url)
    assert refused.value.field == "messages.0.content.0.image_url"
    assert len(refused.value.message) < 200


def test_an_image_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_IMAGE_BYTES", 12)
    parts.image_part("here", "data:image/png;base64," + "AAAA" * 4)
    with pytest.raises(BadRequest, match="larger than 12 bytes"):
        parts.image_part("here", "data:image/png;base64," + "AAAA" * 5)


REFUSED: list[tuple[Dialect, dict[str, Any], str]] = [
    (ChatDialect(), {"messages": [{"role": "system", "content": [image()]}]}, "messages.0.content.0.type"),
    (ChatDialect(), {"messages": [{"role": "assistant", "content": [image()]}]}, "messages.0.content.0.type"),
    (MessagesDialect(), {"system": [{"type": "image"}], "messages": [{"role": "user", "content": "x"}]}, "system.0.type"),
    (MessagesDialect(), {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}}]}]}, "messages.0.content.0.source.type"),
    (MessagesDialect(), {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "data": PIXELS}}]}]}, "messages.0.content.0.source.media_type"),
    (ResponsesDialect(), {"input": [{"role": "developer", "content": [{"type": "input_image", "image_url": DATA}]}]},
     "input.0.content.0.type"),
    (ResponsesDialect(), {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
     "input.0.content.0.file_id"),
    (ResponsesDialect(), {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": DATA}]}]},
     "input.0.content.0.type"),
    (GeminiDialect(), {"contents": [{"role": "model", "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXELS}}]}]},
     "contents.0.parts.0.inlineData"),
    (GeminiDialect(), {"contents": [{"parts": [{"inlineData": {"mimeType": "application/pdf", "data": PIXELS}}]}]},
     "contents.0.parts.0.inlineData.mimeType"),
    (GeminiDialect(), {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png"}}]}]},
     "contents.0.parts.0.inlineData.data"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "field"), REFUSED)
def test_where_no_image_can_stand_it_is_refused_by_name(dialect: Dialect, body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(dialect, body)
    assert refused.value.field == field


def test_a_result_that_is_an_error_says_so_before_its_image() -> None:
    shown = {"type": "image", "source": {"type": "url", "url": AT}}
    result = {"type": "tool_result", "tool_use_id": CALL, "content": [shown], "is_error": True}
    [tool] = parse(MessagesDialect(), {"messages": [{"role": "user", "content": [result]}]}).job.messages
    assert tool["content"] == [text("Error: "), image(AT)]


def test_an_image_alone_is_a_message() -> None:
    shown = {"type": "image", "source": {"type": "url", "url": AT}}
    [user] = parse(MessagesDialect(), {"messages": [{"role": "user", "content": [shown]}]}).job.messages
    assert user == {"role": "user", "content": [image(AT)]}


def test_counts_take_images_too() -> None:
    for counter, body in ((MessagesCount(), messages()), (ResponsesCount(), responses()), (GeminiCount(), gemini())):
        assert has_images(counter.parse_count(json.dumps(body).encode()).job.messages)
