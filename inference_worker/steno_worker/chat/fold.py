"""Rewrites messages that a model's template can't render into a form that it can, by one table for all model families.

    a template refuses, moves or loses …          what it is given instead
    a system message anywhere                     its text at the head of the next user message
    a second leading system message               one system message, texts joined
    a system message later on                     a user message (also where it can't be rendered alone after a reply: GLM)
    two user messages in a row                    one user message, texts joined
    a user message right after a tool result      its text at the end of that tool result
    tool-call ids of another length               nine characters derived from the id (Mistral's manner)
    half a surrogate pair in a call's arguments   U+FFFD: it can be sampled as an escape, and no tokenizer takes it

Texts are joined by an empty line. Which rows hold is found out at load, by rendering small conversations (`probe`), so that a new
family needs no entry; the last one always holds. Assistant messages are never joined or moved: a recorded one stands between
what was and what is new, so folding the new part alone gives the same messages as folding the whole (I2).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steno.contracts.chat import Message
from steno.contracts.errors import BadRequest
from steno.contracts.json_limits import whole_text
from steno_worker.chat.interfaces import Renderer

_JOIN = "\n\n"
MOST_LEVELS = 750
"""Most nested levels in a call's arguments that vLLM parses. Python 3.11 fails at 1,000, callers' frames included; later versions
go deeper, and a server may run another version than we do."""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
"""Those of JSON, and its strings, which may have more of them."""


@dataclass(frozen=True, slots=True)
class MessageFolding:
    """Which rows of the table hold for one model. The default folds nothing."""

    no_system: bool = False
    one_system: bool = False
    late_system: bool = False
    user_after_user: bool = False
    user_after_tool: bool = False
    short_call_ids: bool = False

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """New list; messages that need nothing are passed on as they are. O(messages)."""
        folded: list[Message] = []
        for message in messages:
            last = folded[-1]["role"] if folded else "system"
            role = message["role"]
            if role == "system" and last != "system" and (self.late_system or self.no_system):
                role, message = "user", {**message, "role": "user"}
            joins = (
                (role == "system" and last == "system" and folded and self.one_system)
                or (role == "user" and last == "user" and self.user_after_user)
                or (role == "user" and last == "tool" and self.user_after_tool)
            )
            if joins:
                folded[-1] = {**folded[-1], "content": _joined(folded[-1]["content"], message["content"])}
            else:
                folded.append(_with_whole_pairs(self._with_short_ids(message) if self.short_call_ids else message))
        return _systems_into_user(folded) if self.no_system else folded

    def _with_short_ids(self, message: Message) -> Message:
        if message.get("tool_calls"):
            return {
                **message,
                "tool_calls": [{**call, "id": short_call_id(call["id"])} for call in message["tool_calls"]],
            }
        if message.get("tool_call_id"):
            return {**message, "tool_call_id": short_call_id(message["tool_call_id"])}
        return message


def _with_whole_pairs(message: Message) -> Message:
    calls = message.get("tool_calls") or ()
    if not any("\\ud" in call["function"]["arguments"].lower() for call in calls):
        return message
    whole = [
        {**call, "function": {**call["function"], "arguments": _whole(call["function"]["arguments"])}} for call in calls
    ]
    return {**message, "tool_calls": whole}


def _whole(arguments: str) -> str:
    """Other JSON of the same meaning, where it has half a pair; what is no JSON is text to every template."""
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    whole = whole_text(text)
    return whole if whole != text else arguments


def readable_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of calls for vLLM, which parses arguments before its template gets them, and replaces malformed ones by `{}`. Here
    `{}` replaces those that make its parser fail in another way: nested too deep, or a number of more than 4,300 digits."""
    return [
        {**call, "function": {**call["function"], "arguments": _readable(call["function"]["arguments"])}}
        for call in calls
    ]


def _readable(arguments: str) -> str:
    if _levels(arguments) > MOST_LEVELS:
        return "{}"
    try:
        json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    except (ValueError, RecursionError):
        return "{}"
    return arguments


def _levels(text: str) -> int:
    """How deep JSON is, whether it is whole or not."""
    if text.count("[") + text.count("{") <= MOST_LEVELS:
        return 0
    level = most = 0
    for found in _BRACKETS.finditer(text):
        level += (found[0] in "[{") - (found[0] in "]}")
        most = max(most, level)
    return most


def short_call_id(call_id: str) -> str:
    """Nine ASCII letters and digits; an id that is so already stays."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def probe(format: Renderer) -> MessageFolding:
    """Find out what the template of `format` can't take: about ten renderings of a few messages each."""
    system, user, answer = _say("system"), _say("user"), {"role": "assistant", "content": "ok"}
    short, long = _call("abcdefghi"), _call("call_0123456789ab_0")
    short_call_ids = not _takes(format, [user, *long]) and _takes(format, [user, *short])
    call = short if short_call_ids else long
    no_system = not _takes(format, [system, user])
    user_after_user = not _takes(format, [user, _say("user")])
    user_after_tool = not _takes(format, [user, *call, _say("user")]) and _takes(format, [user, *call])
    late = [[user, answer, _say("system"), _say("user")], [user, answer, _say("user"), _say("system")]]
    return MessageFolding(
        no_system=no_system,
        one_system=not no_system and not _takes(format, [system, _say("system"), user]),
        late_system=not all(_takes(format, messages) for messages in late),
        user_after_user=user_after_user,
        user_after_tool=user_after_tool,
        short_call_ids=short_call_ids,
    )


def _takes(format: Renderer, messages: list[Message]) -> bool:
    """Whether the template renders all of it, in order."""
    try:
        ids = format.render(messages, [], {})
    except BadRequest:
        return False
    text = format.decoder().feed(ids, final=True)
    said = [message["content"] for message in messages if message["role"] != "assistant"]
    places = [text.find(words) for words in said]
    return -1 not in places and places == sorted(places)


def _say(role: str) -> Message:
    return {"role": role, "content": secrets.token_hex(8)}


def _call(call_id: str) -> list[Message]:
    function = {"name": "probe", "arguments": '{"key": "value"}'}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": secrets.token_hex(8)},
    ]


def _joined(first: Any, second: Any) -> Any:
    """Two contents (a str, or a list of parts) as one."""
    if isinstance(first, str) and isinstance(second, str):
        return first + _JOIN + second if first and second else first + second
    return [*_parts(first), {"type": "text", "text": _JOIN}, *_parts(second)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _systems_into_user(messages: list[Message]) -> list[Message]:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if not leading:
        return messages
    content = messages[0]["content"]
    for message in messages[1:leading]:
        content = _joined(content, message["content"])
    rest = messages[leading:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _joined(content, rest[0]["content"])}, *rest[1:]]
    return [{"role": "user", "content": content}, *rest]
