"""The formats that chaos's raw agents speak, read strictly: an event out of place is `Misspoken`, nothing to make the best of.

A conversation is a list of `Line`s; each format makes its own request of it, with its own answers in it exactly as they came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.chaos.schedule import ANY

TOOL_NAME = "look"
_SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}


class Misspoken(Exception):
    """What the format does not allow."""


@dataclass
class Call:
    """arguments: as JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def said(self) -> tuple[str, Any]:
        """Apart from how it is written."""
        return self.name, json.loads(self.arguments)


@dataclass
class Answer:
    """An answer, or the part of one whose blocks were closed. native: what goes back into the conversation."""

    turn_id: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    native: Any = None


@dataclass
class Line:
    """One of: text by `system` or `user`; an answer; results of the last answer's calls, in their order."""

    role: str
    text: str = ""
    answer: Answer | None = None
    results: Sequence[tuple[Call, str]] = ()


class Reader(Protocol):
    """Takes the events of a stream. answer: what it has come to. closed: its closed blocks, which an agent may act on."""

    answer: Answer
    closed: Answer
    whole: bool

    def event(self, data: str) -> None:
        """Raises: Misspoken."""
        ...


class Format(Protocol):
    """whole: an answer in one piece. marked: its clients mark their retries."""

    name: str
    marked: bool

    def path(self, stream: bool, model: str = ANY) -> str: ...
    def body(self, lines: Sequence[Line], stream: bool, model: str = ANY) -> dict[str, Any]: ...
    def whole(self, body: Any) -> Answer: ...
    def reader(self) -> Reader: ...


def _expect(condition: bool, what: str, data: object) -> None:
    if not condition:
        raise Misspoken(f"{what}: {str(data)[:300]}")


# -- OpenAI chat completions


class Chat:
    name, marked = "chat", True

    def path(self, stream: bool, model: str = ANY) -> str:
        return "/v1/chat/completions"

    def body(self, lines: Sequence[Line], stream: bool, model: str = ANY) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for line in lines:
            if line.answer is not None:
                messages.append(line.answer.native)
            elif line.results:
                messages += [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in line.results]
            else:
                messages.append({"role": line.role, "content": line.text})
        tool = {"type": "function", "function": {"name": TOOL_NAME, "parameters": _SCHEMA}}
        return {"model": model, "messages": messages, "tools": [tool], "stream": stream}

    def whole(self, body: Any) -> Answer:
        message = body["choices"][0]["message"]
        calls = [
            Call(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        native = {key: value for key, value in message.items() if value}
        return Answer(body["id"].removeprefix("chatcmpl-"), message.get("content") or "", calls, native)

    def reader(self) -> Reader:
        return _ChatReader()


class _ChatReader:
    """Nothing of a chat stream is closed before its end."""

    def __init__(self) -> None:
        self.answer, self.closed, self.whole = Answer(), Answer(), False
        self._finish = ""

    def event(self, data: str) -> None:
        _expect(not self.whole, "an event after [DONE]", data)
        answer = self.answer
        if data == "[DONE]":
            _expect(bool(self._finish), "[DONE] before a finish reason", data)
            said = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in answer.calls
            ]
            answer.native = {"role": "assistant", "content": answer.content} | ({"tool_calls": said} if said else {})
            self.whole = True
            return
        chunk = json.loads(data)
        turn_id = chunk["id"].removeprefix("chatcmpl-")
        _expect(answer.turn_id in ("", turn_id), "another answer's chunk", data)
        answer.turn_id = turn_id
        for choice in chunk["choices"]:
            delta = choice["delta"]
            _expect(not self._finish, "a choice goes on after its finish reason", data)
            answer.content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(answer.calls):
                    answer.calls.append(Call(piece["id"], piece["function"]["name"], ""))
                _expect(piece["index"] == len(answer.calls) - 1, "a call out of order", data)
                answer.calls[-1].arguments += piece["function"].get("arguments") or ""
            self._finish = choice["finish_reason"] or ""


# -- Anthropic Messages


class Messages:
    name, marked = "messages", True

    def path(self, stream: bool, model: str = ANY) -> str:
        return "/v1/messages"

    def body(self, lines: Sequence[Line], stream: bool, model: str = ANY) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for line in lines:
            if line.answer is not None:
                messages.append({"role": "assistant", "content": line.answer.native})
            elif line.results:
                blocks = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in line.results
                ]
                messages.append({"role": "user", "content": blocks})
            elif line.role == "user":
                messages.append({"role": "user", "content": line.text})
        system = {"system": lines[0].text} if lines[0].role == "system" else {}
        tools = [{"name": TOOL_NAME, "input_schema": _SCHEMA}]
        asked = {"model": model, "max_tokens": 500, "messages": messages, "tools": tools, "stream": stream}
        return asked | {"thinking": {"type": "adaptive"}} | system

    def whole(self, body: Any) -> Answer:
        _expect(bool(body["stop_reason"]), "no stop reason", body)
        return _of_blocks(body["id"].removeprefix("msg_"), body["content"])

    def reader(self) -> Reader:
        return _MessagesReader()


def _of_blocks(turn_id: str, blocks: list[dict[str, Any]]) -> Answer:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    used = [block for block in blocks if block["type"] == "tool_use"]
    calls = [Call(block["id"], block["name"], json.dumps(block["input"])) for block in used]
    return Answer(turn_id, text, calls, blocks)


class _MessagesReader:
    def __init__(self) -> None:
        self.answer, self.closed, self.whole = Answer(), Answer(), False
        self._turn_id = ""
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._json = ""
        self._ended = False
        self._failed = False

    def event(self, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        _expect(not self.whole and not self._failed, "an event after message_stop or an error", data)
        if kind == "error":  # also the first event: a request that waited long has its stream begun by a keepalive
            self._failed = True
            return
        _expect(bool(self._turn_id) != (kind == "message_start") or kind == "ping", "message_start comes first", data)
        if kind == "message_start":
            self._turn_id = self.closed.turn_id = event["message"]["id"].removeprefix("msg_")
        elif kind == "content_block_start":
            _expect(self._open is None and event["index"] == len(self._blocks), "a block out of order", data)
            self._open, self._json = event["content_block"], ""
        elif kind == "content_block_delta":
            _expect(self._open is not None and event["index"] == len(self._blocks), "a delta of no block", data)
            self._delta(event["delta"])
        elif kind == "content_block_stop":
            _expect(self._open is not None and event["index"] == len(self._blocks), "the end of no block", data)
            assert self._open is not None
            if self._open["type"] == "tool_use":
                self._open["input"] = json.loads(self._json or "{}")
            self._blocks.append(self._open)
            self._open = None
            self.closed = _of_blocks(self._turn_id, self._blocks)
        elif kind == "message_delta":
            _expect(self._open is None and bool(event["delta"]["stop_reason"]), "an end with a block open", data)
            self._ended = True
        elif kind == "message_stop":
            _expect(self._ended, "message_stop without a stop reason", data)
            self.answer, self.whole = self.closed, True
        else:
            _expect(kind == "ping", "an event of no known type", data)

    def _delta(self, delta: dict[str, Any]) -> None:
        assert self._open is not None
        kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}
        wanted = kinds.get(delta["type"], "tool_use")
        _expect(self._open["type"] == wanted, "a delta of another kind of block", delta)
        if wanted == "tool_use":
            self._json += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            self._open[name] += delta[name]


# -- OpenAI Responses


class Responses:
    name, marked = "responses", True

    def path(self, stream: bool, model: str = ANY) -> str:
        return "/v1/responses"

    def body(self, lines: Sequence[Line], stream: bool, model: str = ANY) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for line in lines:
            if line.answer is not None:
                items += line.answer.native
            elif line.results:
                items += [
                    {"type": "function_call_output", "call_id": call.id, "output": text} for call, text in line.results
                ]
            else:
                items.append({"role": line.role, "content": line.text})
        tools = [{"type": "function", "name": TOOL_NAME, "parameters": _SCHEMA, "strict": False}]
        return {"model": model, "input": items, "tools": tools, "stream": stream, "store": False}

    def whole(self, body: Any) -> Answer:
        _expect(body["status"] == "completed", "not completed", body)
        return _of_items(body["id"].removeprefix("resp_"), body["output"])

    def reader(self) -> Reader:
        return _ResponsesReader()


def _of_items(turn_id: str, items: list[dict[str, Any]]) -> Answer:
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    called = [item for item in items if item["type"] == "function_call"]
    return Answer(turn_id, text, [Call(one["call_id"], one["name"], one["arguments"]) for one in called], items)


class _ResponsesReader:
    def __init__(self) -> None:
        self.answer, self.closed, self.whole = Answer(), Answer(), False
        self._turn_id = ""
        self._items: list[dict[str, Any]] = []
        self._said = ""
        self._sequence = 0

    def event(self, data: str) -> None:
        event = json.loads(data)
        kind = event["type"]
        _expect(not self.whole, "an event after the end", data)
        _expect(event["sequence_number"] == self._sequence, f"event {self._sequence} is missing", data)
        _expect((kind == "response.created") == (self._sequence == 0), "response.created comes first", data)
        self._sequence += 1
        if kind == "response.created":
            self._turn_id = event["response"]["id"].removeprefix("resp_")
        elif kind == "response.output_item.added":
            _expect(event["output_index"] == len(self._items), "an item out of order", data)
            self._said = ""
        elif kind.endswith(".delta"):
            _expect(event["output_index"] == len(self._items), "a delta of no open item", data)
            self._said += event["delta"]
        elif kind == "response.output_item.done":
            item = event["item"]
            parts = item.get("content") or ()
            text = item.get("arguments", "".join(part["text"] for part in parts))
            _expect(event["output_index"] == len(self._items) and text == self._said, "an item unlike its deltas", data)
            self._items.append(item)
            self.closed = _of_items(self._turn_id, self._items)
        elif kind == "response.completed":
            _expect(event["response"]["output"] == self._items, "another output than its items", data)
            self.answer, self.whole = Responses().whole(event["response"]), True


# -- Google Gemini


class Gemini:
    """Its clients do not mark their retries."""

    name, marked = "gemini", False

    def path(self, stream: bool, model: str = ANY) -> str:
        return f"/v1beta/models/{model}:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"

    def body(self, lines: Sequence[Line], stream: bool, model: str = ANY) -> dict[str, Any]:
        contents: list[dict[str, Any]] = []
        for line in lines:
            if line.answer is not None:
                contents.append({"role": "model", "parts": line.answer.native})
            elif line.results:
                answered = [
                    {"id": call.id, "name": call.name, "response": {"output": text}} for call, text in line.results
                ]
                contents.append({"role": "user", "parts": [{"functionResponse": one} for one in answered]})
            elif line.role == "user":
                contents.append({"role": "user", "parts": [{"text": line.text}]})
        first = {"systemInstruction": {"parts": [{"text": lines[0].text}]}} if lines[0].role == "system" else {}
        declared = {"name": TOOL_NAME, "parametersJsonSchema": _SCHEMA}
        return {"contents": contents, "tools": [{"functionDeclarations": [declared]}]} | first

    def whole(self, body: Any) -> Answer:
        [candidate] = body["candidates"]
        _expect(bool(candidate.get("finishReason")), "no finish reason", body)
        return _of_parts(body["responseId"], candidate["content"]["parts"])

    def reader(self) -> Reader:
        return _GeminiReader()


def _of_parts(turn_id: str, parts: list[dict[str, Any]]) -> Answer:
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    called = [part["functionCall"] for part in parts if "functionCall" in part]
    return Answer(turn_id, text, [Call(one["id"], one["name"], json.dumps(one["args"])) for one in called], parts)


class _GeminiReader:
    """Nothing is closed before the last chunk, which has the calls."""

    def __init__(self) -> None:
        self.answer, self.closed, self.whole = Answer(), Answer(), False
        self._parts: list[dict[str, Any]] = []

    def event(self, data: str) -> None:
        _expect(not self.whole, "a chunk after the finish reason", data)
        chunk = json.loads(data)
        _expect(self.answer.turn_id in ("", chunk["responseId"]), "another answer's chunk", data)
        self.answer.turn_id = chunk["responseId"]
        for candidate in chunk.get("candidates", ()):
            self._parts += (candidate.get("content") or {}).get("parts") or ()
            self.whole = bool(candidate.get("finishReason"))
        self.answer = _of_parts(chunk["responseId"], self._parts)


FORMATS: dict[str, Format] = {one.name: one for one in (Chat(), Messages(), Responses(), Gemini())}
