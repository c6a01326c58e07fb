"""Renders only the new messages (I2): the ids that follow a recorded prompt and completion.

The template only renders whole conversations, and rendering the recorded reply again would not give the sampled ids. So a
*stub* is rendered instead: a short context, the recorded assistant message (same calls, same ids, no reasoning) with a nonce in
its last rendered field, then the new messages. What follows the first stop id after the nonce is new, in token space.

That holds only if what is new does not depend on what is old. Two more renderings, in which the new messages are short nonces,
check it: these nonces must all stand after the cut, and what stands there must not change when context, tools and reply are
reworded. A template that moves its tools before the last user message (Mistral), gathers system messages at the front
(DeepSeek) or has no stop id of its own after a reply is detected so, without a list of models. The work is linear in the
new messages, not in the history.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steno.contracts.chat import Message, Tool
from steno.contracts.errors import BadRequest
from steno.contracts.records import ForkReason
from steno_worker.chat.interfaces import Renderer

Render = Callable[[Sequence[Message], Sequence[Tool], dict[str, Any]], list[int]]
_QUESTION: Message = {"role": "user", "content": "?"}
"""What a template must have seen before a reply: Qwen3 looks for the last question, Llama 3.1 puts the tools there."""


@dataclass(frozen=True, slots=True)
class ExtensionRefusal:
    """Why what is new can't be rendered alone; the caller then renders whole and compares with the record.

    reason: RENDER_REFUSED (the template can't take the stub) or RENDER_DIFFERS (what is new depends on what is old).
    """

    reason: ForkReason
    detail: str


def extend(
    format: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: dict[str, Any],
    *,
    prefix_messages: int,
    last_id: int,
    render: Render | None = None,
    counted: bool = False,
) -> list[int] | ExtensionRefusal:
    """The ids to append to a recorded prompt and completion, which stand for `messages[:prefix_messages]`.

    Args: last_id: the last recorded id. If it is a stop id, the template's stop id is dropped, unless that is the header of the
            next message (GLM: `<|user|>`, `<|observation|>`) and differs from `last_id`. If it is not one, the completion was
            cut off, and the template's stop id closes it.
        render: in place of `format.render` (roles folded, say).
        counted: the template counts: what it renders depends on how many messages of which kind came before (Cohere numbers
            tool results). The context then has all of them, in few words; the work is linear in their number.
    """
    render = render or format.render
    reply, new = messages[prefix_messages - 1], list(messages[prefix_messages:])
    if reply["role"] != "assistant":
        return ExtensionRefusal(ForkReason.RENDER_REFUSED, "the recorded part does not end in an assistant message")
    before = list(messages[: prefix_messages - 1])
    if not counted:
        before = [message for message in before[:1] if message["role"] == "system"] + [_QUESTION]
    # Assistant messages of other origin among the new ones may be rendered by their tool's schema.
    real_tools = list(tools) if any(message["role"] == "assistant" for message in new) else []
    short, marks = _nonces_for(new)

    def rendered(old: _Nonces, field: str, tail: list[Message]) -> list[int]:
        with_tools = [_tool(old.context), *real_tools] if tools else []
        return render([*_reworded(before, old.context), _stub(reply, old.reply, field), *tail], with_tools, options)

    old, reworded = _Nonces(), _Nonces()
    try:
        for field in ("arguments", "content") if reply.get("tool_calls") else ("content",):
            skeleton = rendered(old, field, short)
            cut = _cut(format, skeleton, old.reply, marks)
            if cut is not None:
                break
        else:
            return ExtensionRefusal(
                ForkReason.RENDER_REFUSED, "no stop id between the recorded reply and the new messages"
            )
        tail = skeleton[cut:]
        if rendered(reworded, field, short)[-len(tail) :] != tail:
            return ExtensionRefusal(
                ForkReason.RENDER_DIFFERS, "the template repeats earlier messages after the recorded reply"
            )
        if len(tail) == 1:
            return ExtensionRefusal(ForkReason.RENDER_REFUSED, "no generation prompt")
        whole = rendered(old, field, new)
    except BadRequest as refused:
        return ExtensionRefusal(ForkReason.RENDER_REFUSED, refused.message)
    if whole[: cut + 1] != skeleton[: cut + 1]:
        return ExtensionRefusal(
            ForkReason.RENDER_DIFFERS, "the template renders earlier messages differently, depending on the new ones"
        )
    keeps_own = last_id in format.stop_ids
    if keeps_own and (
        whole[cut] == last_id or not _is_header(format, whole[cut], lambda: rendered(old, field, []), old.reply)
    ):
        return whole[cut + 1 :]
    return whole[cut:]


class _Nonces:
    """A wording of what is old: nonces, fresh so that nothing that is new can contain them."""

    __slots__ = ("context", "reply")

    def __init__(self) -> None:
        self.context, self.reply = secrets.token_hex(8), secrets.token_hex(8)


def _reworded(messages: Sequence[Message], nonce: str) -> list[Message]:
    """The same messages, each saying `nonce` where it said anything."""
    reworded = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        if message["content"]:
            message["content"] = f"{message['role']} {nonce}"
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "{}"}} for call in message["tool_calls"]
            ]
        reworded.append(message)
    return reworded


def _tool(nonce: str) -> Tool:
    function = {"name": f"t{nonce}", "description": nonce, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def _stub(reply: Message, nonce: str, field: str) -> Message:
    stub = {key: value for key, value in reply.items() if key != "reasoning_content"}
    if field == "content":
        return {**stub, "content": nonce}
    *calls, last = reply["tool_calls"]
    stub["tool_calls"] = [*calls, {**last, "function": {**last["function"], "arguments": json.dumps({"nonce": nonce})}}]
    return stub


def _nonces_for(new: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The new messages with a nonce for each content, and those nonces. Assistant messages stay: a template may leave out their
    content when there are calls. Empty ones stay: a template may leave them out whole."""
    short, marks = [], []
    for message in new:
        if message["role"] != "assistant" and message["content"]:
            marks.append(secrets.token_hex(8))
            message = {**message, "content": marks[-1]}
        short.append(message)
    return short, marks


def _cut(format: Renderer, ids: list[int], nonce: str, marks: Sequence[str]) -> int | None:
    """Where the first stop id after `nonce` stands in `ids`, provided that all `marks` come after it."""
    text, ends = _text_with_ends(format, ids)
    place = text.rfind(nonce)
    if place < 0:
        return None
    first = bisect_left(ends, place + len(nonce))
    cut = next((index for index in range(first, len(ids)) if ids[index] in format.stop_ids), None)
    if cut is None or any(text.find(mark, ends[cut]) < 0 for mark in marks):
        return None
    return cut


def _is_header(format: Renderer, stop_id: int, alone: Callable[[], list[int]], nonce: str) -> bool:
    """Whether `stop_id` opens the next message rather than closes the reply: it is gone where nothing follows the reply."""
    try:
        ids = alone()
    except BadRequest:
        return False
    text, ends = _text_with_ends(format, ids)
    return stop_id not in ids[bisect_left(ends, text.rfind(nonce) + len(nonce)) :]


def _text_with_ends(format: Renderer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of `ids`, and how long it was after each of them."""
    decoder, parts, ends, length = format.decoder(), [], [], 0
    for token_id in ids:
        parts.append(decoder.feed([token_id]))
        length += len(parts[-1])
        ends.append(length)
    return "".join(parts), ends
