"""Input items of the Responses format -> canonical messages.

What one turn said comes back as several items (reasoning, message, calls), which become one assistant message again:
items whose ids name the same turn (`msg_<turn_id>_<i>`, `call_<turn_id>_<i>`; see `output.py`) belong
together, and so do neighbours without such ids, except a message after a message. Results of parallel calls may stand
between the calls. An `item_reference` stands for the recorded reply of the turn that it names. Items of unknown types
are dropped and named. Images may stand in messages of the user and in outputs, reasoning in those of the assistant; other parts
are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import blake2b
from itertools import islice
from typing import Any

from steno.contracts.chat import RECORDED, Message
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.parts import Part, SeenParts, content_of, text_part, texts_of, thought_of
from steno_proxy.dialects.refusals import must_be
from steno_proxy.dialects.responses.client_tools import (
    CALLS,
    OUTPUTS,
    ClientKind,
    check_item,
    is_content,
    is_hosted,
    output_text,
)
from steno_proxy.dialects.responses.text import FREE_TEXT
from steno_proxy.dialects.responses.tools import ClientTool, Tools

RAW_CALL = "ctcr"
"""Prefix of a custom call's item id whose arguments were not of the agreed shape: its input is the arguments themselves."""
SUMMARY = "The conversation so far, in short:\n\n"
"""What comes before a summary where it stands for its conversation."""
_OURS = re.compile(r"[a-z]+_([0-9a-f]{12})_[0-9]{1,4}")
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_SEAL = "steno1."


def turn_of(item_id: Any) -> str:
    """The turn that an id of ours names, "" for any other."""
    found = _OURS.fullmatch(item_id) if isinstance(item_id, str) else None
    return found[1] if found else ""


def read_items(field: str, given: list[Any], tools: Tools, seen: SeenParts) -> list[Message]:
    """`given` is the request's `field`. Raises: BadRequest naming what is wrong (`input.3.content.0.type`)."""
    reader = _ItemsReader(tools, seen)
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise must_be("an object", f"{field}.{i}", item)
        reader.take(f"{field}.{i}", item)
    reader.end()
    return reader.messages


class _ItemsReader:
    def __init__(self, tools: Tools, seen: SeenParts) -> None:
        self.messages: list[Message] = []
        self._tools = tools
        self._seen = seen
        self._reply: Message | None = None  # the assistant message that the next item may still belong to
        self._turn = ""  # the turn that it is known to be of
        self._said: list[str] = []  # the texts of its message items
        self._thought: list[str] = []
        self._answered = False  # results have come after it
        self._hosted: set[str] = set()  # ids of calls that the provider ran
        self._asked = False  # a message of the user has come

    def take(self, path: str, item: dict[str, Any]) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind is None:
            raise BadRequest(f"{path}.type is required", field=f"{path}.type")
        if not isinstance(kind, str):
            raise must_be("a string", f"{path}.type", kind)
        if kind == "message":
            self._message(path, item)
        elif kind == "reasoning":
            self._of_turn(turn_of(item.get("id")), reasoning=True)
            self._thought.append(_reasoning(path, item))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(path, item, kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = _string(path, item, "call_id")
            self.messages.append({"role": "tool", "content": self._output(path, item), "tool_call_id": call_id})
            self._answered = True
        elif kind in CALLS:
            self._client_call(path, item, CALLS[kind])
        elif kind in OUTPUTS:
            self._client_output(path, item)
        elif kind == "item_reference":
            named = turn_of(item.get("id"))
            if not named:
                raise BadRequest(f"{path}.id: no stored item has this id", field=f"{path}.id")
            self._of_turn(named)[RECORDED] = named
        elif kind == "compaction":
            self._compaction(path, item)
        elif kind == "additional_tools":
            pass  # `read_tools` has them
        else:
            check_item(path, kind)
            self._seen.dropped.append(kind)

    def _message(self, path: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        content = item.get("content")
        thoughts: list[str] = []
        if not isinstance(content, str):
            images, thinks = self._seen if role == "user" else None, thoughts if role == "assistant" else None
            content = _content(f"{path}.content", content, images, thinks)
        if role == "assistant":
            self._of_turn(turn_of(item.get("id")), message=True)
            self._thought += thoughts
            self._said.append(texts_of({"content": content}))  # what was sampled has no parts
            return
        if role not in ("user", "system", "developer"):
            shown = repr(role[:40]) if isinstance(role, str) else "nothing"
            roles = "system, developer, user, assistant"
            raise BadRequest(f"{path}.role: got {shown}, must be one of {roles}", field=f"{path}.role")
        self.end()
        if role == "user" and not self._asked:
            self._asked = True
            self._drop_reasoning_before_all()
        self.messages.append({"role": "system" if role == "developer" else role, "content": content})

    def _call(self, path: str, item: dict[str, Any], custom: bool) -> None:
        call_id = _string(path, item, "call_id")
        namespace = item.get("namespace")
        place = ClientTool(namespace if isinstance(namespace, str) else "", _string(path, item, "name"))
        if custom:
            text = item.get("input")
            if not isinstance(text, str):
                raise must_be("a string", f"{path}.input", text)
            raw = str(item.get("id", "")).startswith(RAW_CALL + "_")
            arguments = text if raw else to_json({FREE_TEXT: text}).decode()
        else:
            given = item.get("arguments")
            arguments = given if isinstance(given, str) else to_json(given or {}).decode()
        self._called(item, call_id, place, arguments)

    def _called(self, item: dict[str, Any], call_id: str, place: ClientTool, arguments: str) -> None:
        reply = self._of_turn(turn_of(item.get("id")) or turn_of(call_id))
        function = {"name": self._tools.function(place), "arguments": arguments}
        reply.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _client_call(self, path: str, item: dict[str, Any], kind: ClientKind) -> None:
        """A call of a tool that OpenAI defines; one that the provider ran is left out, with its output."""
        call_id = _string(path, item, "call_id")
        if is_hosted(item):
            self._hosted.add(call_id)
            self._seen.dropped.append(kind.call)
            return
        self._called(item, call_id, ClientTool("", kind.name, kind=kind.name), kind.arguments(path, item))

    def _client_output(self, path: str, item: dict[str, Any]) -> None:
        call_id = _string(path, item, "call_id" if "call_id" in item else "id")
        if call_id in self._hosted:
            self._seen.dropped.append(item["type"])
            return
        output = item.get("output")
        content = self._output(path, item) if is_content(output) else None
        if not isinstance(content, list):
            content = output_text(path, item, output if content is None else content)
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        self._answered = True

    def _compaction(self, path: str, item: dict[str, Any]) -> None:
        """What `ResponsesCompact` made of a conversation; another provider's can't be read."""
        sealed = item.get("encrypted_content")
        summary = unseal(f"{path}.encrypted_content", sealed) if isinstance(sealed, str) else None
        if summary is None:
            self._seen.dropped.append("compaction")
            return
        self.end()
        self.messages.append({"role": "user", "content": SUMMARY + summary})

    def _output(self, path: str, item: dict[str, Any]) -> str | list[Part]:
        output = item.get("output")
        if isinstance(output, str):
            return output
        if output is None or isinstance(output, list):
            return _content(f"{path}.output", output, self._seen)
        return to_json(output).decode()

    def end(self) -> None:
        """No more items of the open assistant message."""
        if self._reply is not None:
            self._reply["content"] = "".join(self._said)
            if thoughts := "".join(self._thought):
                self._reply["reasoning_content"] = thoughts
        self._reply, self._turn, self._said, self._thought, self._answered = None, "", [], [], False

    def _drop_reasoning_before_all(self) -> None:
        """Drops a reply of reasoning alone that answers nobody: CrewAI puts that of its last answer before the conversation.
        Looks at all messages so far: for the first of the user only, since what comes later answers somebody."""
        reply = self.messages[-1] if self.messages else None
        if reply is None or reply["role"] != "assistant":
            return
        if any(message["role"] != "system" for message in islice(self.messages, len(self.messages) - 1)):
            return
        if not (reply["content"] or "tool_calls" in reply or RECORDED in reply):
            self.messages.pop()
            self._seen.dropped.append("reasoning")

    def _of_turn(self, turn: str, *, message: bool = False, reasoning: bool = False) -> Message:
        """The assistant message that an item of `turn` ("": unknown) belongs to; a new one if it is not the last."""
        reply = self._reply
        if reply is not None and turn and self._turn:
            same = turn == self._turn
        else:
            begins = reasoning and reply is not None and (self._said or "tool_calls" in reply)
            same = reply is not None and not (self._answered or begins or (message and self._said))
        if reply is None or not same:
            self.end()
            reply = self._reply = {"role": "assistant", "content": ""}
            self.messages.append(reply)
        self._turn = self._turn or turn
        return reply


def _string(path: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{path}.{key} is required", field=f"{path}.{key}")
    return value


def _content(path: str, given: Any, seen: SeenParts | None, thoughts: list[str] | None = None) -> str | list[Part]:
    """Texts and images as canonical content. seen: None where no image may stand. thoughts: gets the texts of reasoning; None
    where there is none."""
    if given is None:
        return ""
    if not isinstance(given, list):
        raise must_be("a string or a list of parts", path, given)
    parts: list[Part] = []
    for j, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image" and seen is not None:
            parts.append(_image(f"{path}.{j}", part, seen))
        elif thoughts is not None and (thought := thought_of(f"{path}.{j}", part)) is not None:
            thoughts.append(thought)
        else:
            parts.append(text_part(_text(f"{path}.{j}", kind, part)))
    return content_of(parts)


def _text(path: str, kind: Any, part: Any) -> str:
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        named = f"got {kind[:40]!r}" if isinstance(kind, str) else "is missing"
        raise BadRequest(
            f"{path}.type: {named}, must be a text part (input_image too in user messages and tool outputs)",
            field=f"{path}.type",
        )
    text = part.get(key)
    if not isinstance(text, str | None):
        raise must_be("a string", f"{path}.{key}", text)
    return text or ""


def _image(path: str, part: dict[str, Any], seen: SeenParts) -> Part:
    if part.get("file_id"):
        raise BadRequest(
            f"{path}.file_id is not supported (the proxy stores no files): send image_url", field=f"{path}.file_id"
        )
    return seen.image(f"{path}.image_url", part.get("image_url"), part.get("detail"))


# -- reasoning -------------------------------------------------------------------------------------------------------------


def seal(reasoning: str) -> str:
    """`encrypted_content`: opaque, checked when it comes back, and enough to restore the text. No secret: the client has the
    text beside it, and an agent may send whatever reasoning it likes. Not compressed, so that it can't unfold to gigabytes."""
    raw = reasoning.encode("utf-8", "surrogatepass")
    return _SEAL + base64.urlsafe_b64encode(blake2b(raw, digest_size=9).digest() + raw).decode()


def unseal(path: str, sealed: str) -> str | None:
    """The text; None: sealed by somebody else.

    Raises: BadRequest: ours, and not as we sealed it.
    """
    if not sealed.startswith(_SEAL):
        return None
    try:
        packed = base64.b64decode(sealed[len(_SEAL) :], altchars=b"-_", validate=True)
        if blake2b(packed[9:], digest_size=9).digest() != packed[:9]:
            raise ValueError("digest")
        return packed[9:].decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error):
        raise BadRequest(f"{path}: the encrypted content could not be verified", field=path) from None


def _reasoning(path: str, item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, else what is sealed in it, else its summary."""
    sealed = item.get("encrypted_content")
    restored = unseal(f"{path}.encrypted_content", sealed) if isinstance(sealed, str) else None
    for texts in (item.get("content"), None if restored is None else [{"text": restored}], item.get("summary")):
        if isinstance(texts, list):
            found = "".join(
                part["text"] for part in texts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
            if found:
                return found
    return ""
