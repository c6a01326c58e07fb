"""Gemini's contents -> canonical messages.

What clients do, and what follows from it:

    one `model` content per streamed chunk     neighbours are one assistant message, their texts joined as they are
    function calls without ids                 the id comes from our `thoughtSignature`, else from the place in the conversation
    function responses without ids             they answer, in order, the calls of that name before them
    thoughts, echoed or not                    reasoning; it does not decide which conversation this is

A part of a type that a model here can't know (executable code) is left out and named in `dropped`; files that are no images
are a 400 naming the part, and so are images that do not come from the user.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from steno.contracts.chat import Message
from steno_proxy.dialects.gemini.fields import Fields
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.parts import Part, SeenParts, content_of, text_part
from steno_proxy.dialects.refusals import must_be

UNPARSED = "__unparsedToolInput"
"""The one argument of a call whose arguments are no JSON object: `args` can only be one."""
_DATA = ("inlineData", "fileData")
_BESIDE = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})


def sign(call_id: str) -> str:
    """A `thoughtSignature` that brings a call's id back from clients that drop ids."""
    return base64.b64encode(call_id.encode()).decode()


def signed(signature: Any) -> str:
    """The id in a signature of ours; of any other, "". Clients write either alphabet of base64."""
    if not isinstance(signature, str) or len(signature) > 256:
        return ""
    try:
        call_id = base64.b64decode(signature.translate(_URLSAFE), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
    return call_id if call_id.startswith("fc_") and call_id.isprintable() else ""


_URLSAFE = str.maketrans("-_", "+/")


def messages_of(body: Fields, seen: SeenParts) -> list[Message]:
    """Raises: BadRequest naming the part that can't be read."""
    reader = _ContentsReader(seen)
    system = body.get("systemInstruction")
    if system is not None:
        reader.system(Fields({"parts": [{"text": system}]} if isinstance(system, str) else system, "systemInstruction"))
    contents = body.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        raise must_be("a list of at least one", "contents", contents)
    for i, content in enumerate(contents):
        reader.content(Fields(content, f"contents.{i}"))
    reader.end()
    return reader.messages


class _OpenCalls:
    """Calls of one assistant message that have no result yet. Each result costs the same, however many calls there are: they
    are sorted by id and by name once, with the first result, since all calls of a message come before it."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] = []  # (id, name)
        self._answered = bytearray()
        self._all: list[int] = []
        self._by_id: dict[str, list[int]] = {}
        self._by_name: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """How many calls the message has, answered ones included."""
        return len(self._calls)

    def add(self, call_id: str, name: str) -> None:
        self._calls.append((call_id, name))

    def answer(self, call_id: str, name: str) -> tuple[str, str] | None:
        """Close the call that a result answers. Returns its (id, name): the first open call with that id; without an id, the
        first open one with that name, else the first open one. None: there is none."""
        if self._calls and not self._answered:
            self._sort()
        if call_id:
            return self._first(self._by_id.get(call_id))
        return self._first(self._by_name.get(name)) or self._first(self._all)

    def _sort(self) -> None:
        """Fill the lists with the oldest call last, so that `pop` takes it in constant time."""
        self._answered = bytearray(len(self._calls))
        self._all = list(range(len(self._calls) - 1, -1, -1))
        for place in self._all:
            call_id, name = self._calls[place]
            self._by_id.setdefault(call_id, []).append(place)
            self._by_name.setdefault(name, []).append(place)

    def _first(self, places: list[int] | None) -> tuple[str, str] | None:
        while places:
            place = places.pop()
            if not self._answered[place]:
                self._answered[place] = 1
                return self._calls[place]
        return None


class _ContentsReader:
    def __init__(self, seen: SeenParts) -> None:
        self.messages: list[Message] = []
        self._seen = seen
        self._reply: Message = {}  # the last assistant message
        self._open = _OpenCalls()  # of it
        self._said: dict[str, list[str]] = {}  # its texts so far, by the key that they become

    def system(self, content: Fields) -> None:
        texts = self._texts(content)
        if texts:
            self.messages.append({"role": "system", "content": content_of([text_part(text) for text in texts])})

    def content(self, content: Fields) -> None:
        role = content.text("role") or "user"
        if role == "model":
            self._model(content)
        elif role in ("user", "function", "tool"):
            self._user(content)
        elif role == "system":
            self.system(content)
        else:
            raise content.refuse("role", f"got {role[:40]!r}, must be user or model")

    def _model(self, content: Fields) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            message = self.messages[-1]
        else:
            self.end()
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
            self._reply, self._open = message, _OpenCalls()
        for part in content.each("parts"):
            kind = self._kind(part)
            if kind == "text":
                key = "reasoning_content" if part.flag("thought") else "content"
                text = part.text("text") or ""
                if text:
                    self._said.setdefault(key, []).append(text)
            elif kind == "functionCall":
                message.setdefault("tool_calls", []).append(self._call(part))
            elif kind == "functionResponse" or kind in _DATA:
                raise part.refuse(kind, "is allowed only in a content with role user")

    def end(self) -> None:
        """No more contents come for the assistant message that was the last."""
        for key, texts in self._said.items():
            self._reply[key] = "".join(texts)
        self._said = {}

    def _call(self, part: Fields) -> dict[str, Any]:
        call = Fields(part.get("functionCall"), part.at("functionCall"))
        name = call.text("name")
        if not name:
            raise call.refuse("name", "is required")
        arguments = call.sub("args", {}).given
        raw = arguments.get(UNPARSED) if len(arguments) == 1 else None
        call_id = (
            call.text("id") or signed(part.get("thoughtSignature")) or f"fc_{len(self.messages)}_{len(self._open)}"
        )
        self._open.add(call_id, name)
        text = raw if isinstance(raw, str) else to_json(arguments).decode()
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _user(self, content: Fields) -> None:
        """Results first, whatever their place among the parts: templates want them right after their calls."""
        parts: list[Part] = []
        answered = False
        for part in content.each("parts"):
            kind = self._kind(part)
            if kind == "text":
                parts.append(text_part(part.text("text") or ""))
            elif kind in _DATA:
                parts.append(_image(part, kind, self._seen))
            elif kind == "functionResponse":
                self.messages.append(self._result(Fields(part.get("functionResponse"), part.at("functionResponse"))))
                answered = True
            elif kind == "functionCall":
                raise part.refuse("functionCall", "is allowed only in a content with role model")
        if parts or not answered:
            self.messages.append({"role": "user", "content": content_of(parts)})

    def _result(self, result: Fields) -> Message:
        name = result.text("name") or ""
        images: list[Part] = []
        for part in result.each("parts"):
            if (kind := self._kind(part)) in _DATA:
                images.append(_image(part, kind, self._seen))
        response = result.sub("response", {}).given
        given = result.text("id") or ""
        match = self._open.answer(given, name)
        message: Message = {"role": "tool", "content": content_of([text_part(_result_text(response)), *images])}
        if call_id := given or (match[0] if match else ""):
            message["tool_call_id"] = call_id
        if name or match:
            message["name"] = name or (match[1] if match else "")
        return message

    def _texts(self, content: Fields) -> list[str]:
        texts = []
        for part in content.each("parts"):
            kind = self._kind(part)
            if kind in _DATA:
                raise part.refuse(kind, "is allowed only in a content with role user")
            if kind == "text":
                texts.append(part.text("text") or "")
        return texts

    def _kind(self, part: Fields) -> str:
        """`text`, `functionCall`, `functionResponse`, `inlineData`, `fileData`, or "" for what is left out."""
        for kind in ("functionCall", "functionResponse", "text", *_DATA):
            if part.get(kind) is not None:
                return kind
        unknown = [name for name, value in part.given.items() if value is not None and _camel(name) not in _BESIDE]
        if unknown:
            self._seen.dropped.append(unknown[0])
        return ""


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _image(part: Fields, kind: str, seen: SeenParts) -> Part:
    """An image inline, or behind a URL. Raises: BadRequest: another kind of file."""
    given = Fields(part.get(kind), part.at(kind))
    media_type = given.text("mimeType") or ""
    if media_type and not media_type.lower().startswith("image/"):
        raise given.refuse("mimeType", f"got {media_type[:60]!r}, must be an image type (image/...)")
    if kind == "fileData":
        return seen.image(given.at("fileUri"), given.text("fileUri"))
    path = given.at("data")
    text = (given.text("data") or "").translate(_URLSAFE)
    if not media_type or not text:
        missing = "data" if media_type else "mimeType"
        raise given.refuse(missing, "is required")
    return seen.image(path, f"data:{media_type.lower()};base64,{text}")


def _result_text(response: dict[str, Any]) -> str:
    """A function's result as text: the output itself where it is one, else JSON. `result` is what Google's SDK calls it."""
    if len(response) == 1 and isinstance(said := response.get("output", response.get("result")), str):
        return said
    return to_json(response).decode()
