"""Request bodies of any size, in the shapes that a hostile sandbox would try: each grows in one respect alone.

A shape is written once, as an abstract conversation, and told in the words of each dialect; what only one format has is a shape
of that dialect's own. Sizes are about: a body is filled with whole units.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
HEADER = "x-anthropic-billing-header: cc_version=1\n"
OURS = "_0123456789ab_0"
PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


@dataclass
class Said:
    """One message. role: system, user, assistant, result. calls: (id, name, arguments). call: of a result: (id, name)."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    call: tuple[str, str] = ("", "")
    images: int = 0
    marked: bool = False


@dataclass
class Talk:
    """tools: (name, parameters). allowed: names of the tools to choose from. schema: of the answer."""

    said: list[Said]
    tools: list[tuple[str, Json]] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    schema: Json | None = None
    stops: list[str] = field(default_factory=list)
    metadata: Json | None = None


USER = Said("user", ["go"])
Shape = Callable[[int], Talk]


def _each(size: int, unit: int, make: Callable[[int], Any]) -> list[Any]:
    """As many as fill `size` bytes at about `unit` bytes each."""
    return [make(i) for i in range(max(1, size // unit))]


def _talk(*said: Said, **rest: Any) -> Talk:
    return Talk([*said, USER], **rest)


def _calls(size: int, name: str = "f", call_id: str = "c{}", back: str = "", results: bool = True) -> Talk:
    """back: how results come, if not as the calls: "reversed", "unnamed" (without ids), both, or "unknown" (of an
    id that no call has)."""
    n = max(1, size // 120)
    calls = [(call_id.format(i), name.format(i), '{"a":1}') for i in range(n)]
    named = {"unnamed": "", "unnamed, reversed": "", "unknown": "x"}.get(back)
    answers = [Said("result", ["ok"], call=(one[0] if named is None else named, one[1])) for one in calls]
    return _talk(
        Said("assistant", calls=calls), *((answers[::-1] if "reversed" in back else answers) if results else ())
    )


def _rounds(size: int) -> Talk:
    def round_(i: int) -> list[Said]:
        call = (f"call_{i:012x}_0", "f", '{"a":1}')
        return [Said("user", ["a"]), Said("assistant", ["b"], ["c"], [call]), Said("result", ["ok"], call=call[:2])]

    return _talk(*(one for each in _each(size, 400, round_) for one in each))


def _wide(size: int) -> Json:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(max(1, size // 27))}}


def _below_a_long_name(size: int) -> Json:
    inner = {f"p{i}": {"type": "string"} for i in range(max(1, size // 54))}
    return {"type": "object", "properties": {"k" * (size // 2): {"type": "object", "properties": inner}}}


def _deep(levels: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _argued(arguments: str) -> Talk:
    return _talk(Said("assistant", calls=[("c", "f", arguments)]), Said("result", ["ok"], call=("c", "f")))


def _wrapped(size: int) -> str:
    text = "a" * (size // 2)
    for _ in range(12):
        text = json.dumps({"__unparsedToolInput": text})
    return text


def _named(size: int) -> Talk:
    names = [f"tool{i}" for i in range(max(1, size // 60))]
    return _talk(tools=[(name, {}) for name in names], allowed=names)


SHAPES: dict[str, Shape] = {
    "tiny messages": lambda size: _talk(*_each(size, 32, lambda i: Said("user", ["a"]))),
    "empty messages": lambda size: _talk(*_each(size, 32, lambda i: Said("user", [""]))),
    "a long conversation": lambda size: _talk(*_each(size, 36, lambda i: Said(("user", "assistant")[i % 2], [f"a{i}"]))),
    "replies in a row": lambda size: _talk(*_each(size, 36, lambda i: Said("assistant", [f"a{i}"]))),
    "replies in two": lambda size: _talk(
        *_each(size, 40, lambda i: Said(("user", "assistant", "assistant")[i % 3], [f"a{i}"]))
    ),
    "parts of a user": lambda size: _talk(Said("user", ["a"] * (size // 27))),
    "parts of a reply": lambda size: _talk(Said("assistant", ["a" * 16] * (size // 42))),
    "system messages": lambda size: _talk(*_each(size, 36, lambda i: Said("system", ["a"]))),
    "replies below system messages": lambda size: _talk(
        *_each(size // 3, 36, lambda i: Said("system", ["a"])),
        *_each(size * 2 // 3, 36, lambda i: Said(("assistant", "user")[i % 2], [f"a{i}"])),
    ),
    "system parts": lambda size: _talk(Said("system", ["a"] * (size // 27))),
    "header lines": lambda size: _talk(Said("system", ["Hello.\n" + HEADER]), Said("system", [" ", HEADER * (size // 41)])),
    "header parts": lambda size: _talk(Said("system", [HEADER] * (size // 68))),
    "header lines of a user": lambda size: _talk(Said("user", [HEADER * (size // 41)])),
    "one text": lambda size: _talk(Said("user", ["a " * (size // 2)])),
    "one white space": lambda size: _talk(Said("system", [" " * (size // 2) + "."]), Said("user", ["\t" * (size // 4)])),
    "half surrogate pairs": lambda size: _talk(Said("user", ["\ud800" * (size // 6)])),
    "surrogate pairs": lambda size: _talk(Said("user", ["\U0001f600" * (size // 12)])),
    "an open tag": lambda size: _talk(Said("assistant", ["<" + "a" * size])),
    "closed tags": lambda size: _talk(Said("assistant", ["<think>" + "</thin" * (size // 12) + "<think>" * (size // 14)])),
    "tools": lambda size: _talk(tools=_each(size, 80, lambda i: (f"tool{i}", {}))),
    "tools of one name": lambda size: _talk(tools=_each(size, 80, lambda i: ("tool", {}))),
    "a wide schema": lambda size: _talk(tools=[("f", _wide(size))]),
    "deep schemas": lambda size: _talk(tools=_each(size, 3100, lambda i: (f"f{i}", _deep(80)))),
    "a long name above many": lambda size: _talk(tools=[("f", _below_a_long_name(size))]),
    "an answer's schema": lambda size: _talk(schema=_wide(size)),
    "an answer's long name above many": lambda size: _talk(schema=_below_a_long_name(size)),
    "tools x names": _named,
    "calls without results": lambda size: _calls(size, results=False),
    "calls with results": _calls,
    "results the other way round": lambda size: _calls(size, back="reversed"),
    "results without ids": lambda size: _calls(size, name="f{}", back="unnamed"),
    "results without ids, the other way round": lambda size: _calls(size, name="f{}", back="unnamed, reversed"),
    "results without ids or names of their own": lambda size: _calls(size, back="unnamed"),
    "results of an unknown id": lambda size: _calls(size, back="unknown"),
    "one id": lambda size: _calls(size, call_id="c"),
    "ids that could be ours": lambda size: _calls(size, call_id="call_{:012x}_0"),
    "results without calls": lambda size: _talk(*_each(size, 70, lambda i: Said("result", ["ok"], call=(f"c{i}", "f")))),
    "results of no call": lambda size: _talk(*_each(size, 70, lambda i: Said("result", ["ok"]))),
    "an id of underscores": lambda size: _talk(Said("result", ["ok"], call=("_" * size, "f"))),
    "an id of half ids": lambda size: _talk(Said("result", ["ok"], call=(OURS * (size // 15) + "x", "f"))),
    "rounds of calls": _rounds,
    "long arguments": lambda size: _argued(json.dumps(dict.fromkeys(map(str, range(size // 14)), 1))),
    "arguments in arguments": lambda size: _argued(_wrapped(size)),
    "arguments that are none": lambda size: _argued("{" * size),
    "deep arguments": lambda size: _argued("[" * size + "]"),
    "arguments of digits": lambda size: _argued('{"a":[' + ",".join(["12345678901234567890"] * (size // 21)) + "]}"),
    "reasoning": lambda size: _talk(Said("assistant", ["a"], ["b"] * (size // 40))),
    "images": lambda size: _talk(Said("user", images=size // 120)),
    "cache marks": lambda size: _talk(*_each(size, 90, lambda i: Said("user", ["a"], marked=True))),
    "stops": lambda size: _talk(stops=["a"] * (size // 4)),
    "metadata": lambda size: _talk(metadata={f"k{i}": "v" for i in range(size // 14)}),
}  # fmt: skip
"""Those of every dialect."""


# -- in the words of each dialect -----------------------------------------------------------------------------------------


def chat(talk: Talk) -> Json:
    body: Json = {"model": "m", "messages": [_chat_message(one) for one in talk.said]}
    body["tools"] = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in talk.tools] or None
    if talk.allowed:
        named = [{"type": "function", "function": {"name": name}} for name in talk.allowed]
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    if talk.schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": talk.schema}}
    return body | {"stop": talk.stops or None, "metadata": talk.metadata}


def _chat_message(one: Said) -> Json:
    mark = {"cache_control": {"type": "ephemeral"}} if one.marked else {}
    parts: list[Json] = [{"type": "text", "text": text} | mark for text in one.texts]
    parts += [{"type": "image_url", "image_url": {"url": PIXEL}}] * one.images
    message: Json = {"role": "tool" if one.role == "result" else one.role}
    message["content"] = one.texts[0] if len(parts) == 1 and not mark and one.texts else parts
    if one.reasoning:
        message["reasoning_content"] = "".join(one.reasoning)
    if one.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in one.calls
        ]
    if one.role == "result":
        message["tool_call_id"] = one.call[0]
    return message


def messages(talk: Talk) -> Json:
    body: Json = {"model": "m", "max_tokens": 9, "messages": []}
    system = [text for one in talk.said if one.role == "system" for text in one.texts]
    if system:
        body["system"] = [{"type": "text", "text": text} for text in system]
    for one in talk.said:
        mark = {"cache_control": {"type": "ephemeral"}} if one.marked else {}
        blocks: list[Json] = [{"type": "thinking", "thinking": text, "signature": ""} for text in one.reasoning]
        blocks += [{"type": "text", "text": text} | mark for text in one.texts]
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
        blocks += [{"type": "image", "source": source}] * one.images
        blocks += [{"type": "tool_use", "id": i, "name": n, "input": _object(a)} for i, n, a in one.calls]
        if one.role == "result":
            blocks = [{"type": "tool_result", "tool_use_id": one.call[0] or "c", "content": blocks}]
        if one.role != "system":
            body["messages"].append({"role": "assistant" if one.role == "assistant" else "user", "content": blocks})
    body["tools"] = [{"name": n, "input_schema": p} for n, p in talk.tools] or None
    if talk.allowed:
        body["tool_choice"] = {"type": "tool", "name": talk.allowed[-1]}
    if talk.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": talk.schema}}
    return body | {"stop_sequences": talk.stops or None, "metadata": talk.metadata}


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def responses(talk: Talk) -> Json:
    items: list[Json] = []
    for one in talk.said:
        items += [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in one.reasoning]
        kind = "output_text" if one.role == "assistant" else "input_text"
        parts: list[Json] = [{"type": kind, "text": text} for text in one.texts]
        parts += [{"type": "input_image", "image_url": PIXEL}] * one.images
        if one.role == "result":
            items.append({"type": "function_call_output", "call_id": one.call[0] or "c", "output": parts})
        elif parts:
            items.append({"type": "message", "role": one.role, "content": parts})
        items += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in one.calls]
    body: Json = {"model": "m", "input": items}
    body["tools"] = [{"type": "function", "name": n, "parameters": p} for n, p in talk.tools] or None
    if talk.allowed:
        named = [{"type": "function", "name": name} for name in talk.allowed]
        body["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": named}
    if talk.schema:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": talk.schema}}
    return body | {"stop": talk.stops or None, "metadata": talk.metadata}


def gemini(talk: Talk) -> Json:
    contents: list[Json] = []
    system: list[Json] = []
    for one in talk.said:
        parts: list[Json] = [{"text": text, "thought": True} for text in one.reasoning]
        parts += [{"text": text} for text in one.texts]
        parts += [{"inlineData": {"mimeType": "image/png", "data": PIXEL.partition(",")[2]}}] * one.images
        for call_id, name, arguments in one.calls:
            args = _object(arguments)
            args = args if isinstance(args, dict) else {"__unparsedToolInput": args}
            parts.append({"functionCall": {"id": call_id, "name": name, "args": args}})
        if one.role == "result":
            called = {"id": one.call[0], "name": one.call[1]}
            response = {"output": one.texts[0]}
            parts = [{"functionResponse": {k: v for k, v in called.items() if v} | {"response": response}}]
        if one.role == "system":
            system += parts
        else:
            contents.append({"role": "model" if one.role == "assistant" else "user", "parts": parts})
    body: Json = {
        "contents": contents,
        "generationConfig": {"stopSequences": talk.stops or None},
        "labels": talk.metadata,
    }
    if system:
        body["systemInstruction"] = {"parts": system}
    body["tools"] = [{"functionDeclarations": [{"name": n, "parameters": p} for n, p in talk.tools]}]
    if talk.allowed:
        body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": talk.allowed}}
    if talk.schema:
        body["generationConfig"] |= {"responseMimeType": "application/json", "responseSchema": talk.schema}
    return body


def completions(talk: Talk) -> Json:
    """There is one text only."""
    return {
        "model": "m",
        "prompt": "".join(text for one in talk.said for text in one.texts),
        "stop": talk.stops or None,
    }


# -- what only one of them has --------------------------------------------------------------------------------------------


def _spaced(size: int, inner: Json, about: str, name: str = "n") -> Json:
    """A namespace of tools."""
    tools = [inner | {"name": f"t{i}"} for i in range(max(1, size // 60))]
    return {"input": "go", "tools": [{"type": "namespace", "name": name, "description": about, "tools": tools}]}


def _dropped(size: int) -> list[Json]:
    return _each(size, 20, lambda i: {"type": f"x{i}"})


def _documents(size: int) -> Json:
    """As deep as a reader that calls itself would go."""
    inner: list[Any] = ["a"] * (size // 4)
    for _ in range(120):
        inner = [{"type": "document", "source": {"type": "content", "content": inner}}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": inner}]}


def _changed(size: int, each: int, tool: Callable[[int], Json]) -> Json:
    """Deferred tools, and a system message that adds and removes tools."""
    tools = _each(size // 3, 60, lambda i: {"name": f"t{i}", "input_schema": {}, "defer_loading": True})
    blocks = _each(size // 3, each, lambda i: {"type": "tool_addition", "tool": tool(i)})
    gone = _each(size // 3, 90, lambda i: {"type": "tool_removal", "tool": {"type": "tool_reference", "name": f"t{i}"}})
    note = {"role": "system", "content": [*blocks, *gone]}
    return {"max_tokens": 9, "tools": tools, "messages": [{"role": "user", "content": "a"}, note]}


_FUNCTION = {"type": "function"}
OWN: dict[str, dict[str, Callable[[int], Json]]] = {
    "chat": {
        "biased": lambda size: chat(_talk()) | {"logit_bias": {str(i): 1 for i in range(size // 10)}},
        "template arguments": lambda size: chat(_talk()) | {"chat_template_kwargs": _wide(size)},
        "a bad role at the end": lambda size: {"messages": [
            *_each(size // 2, 30, lambda i: {"role": "user", "content": "a"}), {"role": "x" * (size // 2), "content": "a"}]},
        "stop tokens": lambda size: chat(_talk()) | {"stop_token_ids": [1] * (size // 2)},
        "tools that messages bring": lambda size: {"messages": [{"role": "user", "content": "a"}, *_each(size, 110, lambda i: {
            "role": "system", "tools": [_FUNCTION | {"function": {"name": f"t{i}"}}]})]},
        "tools left out": lambda size: {"messages": [{"role": "user", "content": "a"}], "tools": [
            _FUNCTION | {"function": {"name": "t"}}, *_dropped(size)]},
    },
    "messages": {
        "documents": lambda size: {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": _each(size, 110, lambda i: {
                "type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}})}],
        },
        "documents in documents": _documents,
        "tools that messages define": lambda size: _changed(size, 140, lambda i: {
            "type": "tool_definition", "definition": {"name": f"t{i}", "input_schema": {}}}),
        "tools that messages add and remove": lambda size: _changed(size, 90, lambda i: {
            "type": "tool_reference", "name": f"t{i}"}),
        "unknown blocks": lambda size: {"max_tokens": 9, "messages": [{"role": "user", "content": [*_dropped(size), "a"]}]},
        "system in the middle": lambda size: {
            "max_tokens": 9,
            "messages": [{"role": "system", "content": HEADER * (size // 41) + "a"}, {"role": "user", "content": "a"}],
        },
    },
    "responses": {
        "namespaces": lambda size: {"input": "go", "tools": _each(size, 100, lambda i: {
            "type": "namespace", "name": f"n{i}", "description": "d", "tools": [_FUNCTION | {"name": "t"}]})},
        "a described namespace": lambda size: _spaced(size // 2, _FUNCTION, "d" * (size // 2)),
        "a described namespace of tools left out": lambda size: {"input": "go", "tools": [{
            "type": "namespace", "name": "n", "description": "d" * (size // 2), "tools": [{"type": "x"}] * (size // 28)}]},
        "a long namespace": lambda size: _spaced(size // 2, _FUNCTION, "", "n" * (size // 2)),
        "a namespace of namesakes": lambda size: {"input": "go", "tools": [{"type": "namespace", "name": "n", "tools": [
            _FUNCTION | {"name": "t"}] * (size // 40)}]},
        "additional tools": lambda size: {"input": [{"role": "user", "content": "go"}, *_each(size, 90, lambda i: {
            "type": "additional_tools", "tools": [_FUNCTION | {"name": f"t{i}"}]})]},
        "additional tools in one": lambda size: {"input": [{"role": "user", "content": "go"}, {
            "type": "additional_tools", "tools": _each(size, 35, lambda i: _FUNCTION | {"name": f"t{i}"})}]},
        "calls of a namespace": lambda size: {"input": _each(size, 100, lambda i: {
            "type": "function_call", "call_id": f"c{i}", "namespace": "n", "name": "t", "arguments": "{}"})},
        "calls of a shell": lambda size: {"tools": [{"type": "shell"}], "input": [
            {"role": "user", "content": "go"}, *_each(size, 90, lambda i: {
                "type": "shell_call", "call_id": f"c{i}", "action": {"commands": ["a"]}})]},
        "outputs of a shell": lambda size: {"input": [{"role": "user", "content": "go"}, {
            "type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": "b"}] * (size // 30)}]},
        "hosted calls of a shell": lambda size: {"input": [{"role": "user", "content": "go"}, *_each(size, 90, lambda i: {
            "type": "shell_call", "call_id": f"c{i}", "environment": {"type": "container_reference"}})]},
        "references": lambda size: {"input": _each(size, 110, lambda i: {
            "type": "item_reference", "id": f"msg_{i:012x}_0"})},
        "unknown items": lambda size: {"input": [*_dropped(size), {"role": "user", "content": "go"}]},
        "items of many turns": lambda size: {"input": _each(size, 90, lambda i: {
            "type": "message", "role": "assistant", "id": f"msg_{i:012x}_0", "content": "a"})},
        "instructions": lambda size: {"input": "go", "instructions": _each(size, 40, lambda i: {
            "role": "developer", "content": "a"})},
        "custom tools": lambda size: {"input": "go", "tools": _each(size, 45, lambda i: {"type": "custom", "name": f"t{i}"})},
    },
    "gemini": {
        "chunks of a reply": lambda size: {"contents": _each(size, 60, lambda i: {
            "role": "model", "parts": [{"text": "a" * 16}]})},
        "thoughts of a reply": lambda size: {"contents": _each(size, 60, lambda i: {
            "role": "model", "parts": [{"text": "a", "thought": True}]})},
        "unknown parts": lambda size: {"contents": [{"parts": _each(size, 18, lambda i: {f"x{i}": 1})}]},
        "a wrong schema below a long name": lambda size: {"contents": [], "tools": [{"functionDeclarations": [{
            "name": "f", "parameters": {"properties": {"k" * size: {"properties": {"a": 1}}}}}]}]},
        "underscores": lambda size: {"contents": [{"parts": [{"x" + "_" * size: 1}]}]},
    },
    "completions": {"ids": lambda size: {"prompt": [1] * (size // 2)}},
}  # fmt: skip
