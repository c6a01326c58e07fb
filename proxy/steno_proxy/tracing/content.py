"""Messages as OpenTelemetry's GenAI conventions have them (`gen_ai.input.messages`, `gen_ai.output.messages`). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

MOST_CHARS = 65_536
"""Of one attribute. Of a longer one the longest texts are cut, and say so."""
LEAST_CHARS = 256
"""The shortest length to which a text is cut."""


def shown(messages: Sequence[dict[str, Any]], finish_reason: str | None = None) -> str:
    """JSON of messages in the canonical shape (`steno.contracts.chat`). finish_reason: of the model, for what it said."""
    found = [_message(message) for message in messages]
    if finish_reason is not None:
        for one in found:
            one["finish_reason"] = finish_reason
    said = json.dumps(found, ensure_ascii=False)
    room = MOST_CHARS
    while len(said) > MOST_CHARS and room > LEAST_CHARS:
        room //= 4
        said = json.dumps([_cut(one, room) for one in found], ensure_ascii=False)
    if len(said) > MOST_CHARS:  # many messages: only their number is shown
        return json.dumps([{"role": "system", "parts": [_text(f"[{len(found)} messages, too long to be shown]")]}])
    return said


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "parts": list(_parts(message))}


def _parts(message: dict[str, Any]) -> Iterable[dict[str, Any]]:
    content = message.get("content") or ""
    texts = [_part(part) for part in content] if isinstance(content, list) else [_text(content)] if content else []
    if message["role"] == "tool":
        answer = "".join(part.get("content", "") for part in texts)
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": answer}
        return
    if reasoning := message.get("reasoning_content"):
        yield {"type": "reasoning", "content": reasoning}
    yield from texts
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {"type": "tool_call", "id": call.get("id"), "name": function["name"], "arguments": function["arguments"]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return _text(part["text"])
    url = part["image_url"]["url"]
    return {"type": "uri", "modality": "image", "uri": url if not url.startswith("data:") else "[inline image]"}


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def _cut(message: dict[str, Any], room: int) -> dict[str, Any]:
    return message | {
        "parts": [{name: short(value, room) for name, value in part.items()} for part in message["parts"]]
    }


def short(value: Any, room: int = LEAST_CHARS) -> Any:
    """A text that is longer than `room`, cut in its middle; all else as it is."""
    if not isinstance(value, str) or len(value) <= room:
        return value
    return f"{value[: room // 2]}[{len(value) - room // 2 * 2} characters left out]{value[-(room // 2) :]}"
