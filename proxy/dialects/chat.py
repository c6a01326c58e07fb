"""OpenAI Chat Completions: `POST /{trial_id}/v1/chat/completions`, streamed and not.

What a client may send is honoured or refused by name; what it does not know of (unknown fields, at every level) is ignored.
`developer` is `system`; null, absent and "" content are the same; content parts are text (anything else is a 400 naming
the part). `tool_choice: allowed_tools` offers the model the allowed tools only. Clients echo `reasoning_content`
(some say `reasoning`), which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from proxy.contracts.canonical import (
    CanonicalRequest,
    Job,
    Message,
    ResponseFormat,
    TokenLogprob,
    Tool,
    ToolCallPiece,
)
from proxy.contracts.errors import BadRequest, StenoError
from proxy.dialects import openai
from proxy.dialects.base import Choice, Header, Piece, Writer, check_range, check_wire, decode
from proxy.dialects.openai import to_json
from proxy.dialects.openai_schema import CHAT


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _ToolFunction | None = None


class _JsonSchema(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _Body(openai.SamplingBody, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None


_decoder = msgspec.json.Decoder(_Body)


class Chat:
    """The dialect. Stateless."""

    name: ClassVar[str] = "chat"
    paths: ClassVar[tuple[str, ...]] = ("/v1/chat/completions",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = openai.KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        return _canonical(decode(_decoder, body))

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return ChatWriter(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        wants_logprobs = request.job.top_logprobs is not None
        return to_json(
            {
                "id": f"chatcmpl-{header.answer_id}",
                "object": "chat.completion",
                "created": header.created,
                "model": header.model,
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message_out(choice.message),
                        "logprobs": {"content": _logprobs(choice.tokens), "refusal": None} if wants_logprobs else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": openai.usage(choices),
                "service_tier": None,
                "system_fingerprint": None,
            }
        )

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return openai.error_body(error)

    def broken(self, error: StenoError) -> bytes:
        """Nothing: chat clients retry a broken connection, and several treat an error event as the end of their work."""
        return b""

    def openapi(self) -> dict[str, Any]:
        return CHAT


# -- request --------------------------------------------------------------------------------------------------------------


def _canonical(body: _Body) -> CanonicalRequest:
    if not body.messages:
        raise BadRequest("messages must not be empty", field="messages")
    if body.functions:
        raise BadRequest("functions is the retired form: send tools", field="functions")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest("only the modality text can be served", field="modalities")
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    choice, tools = _tool_choice(body.tool_choice, tools)
    job = Job(
        messages=[_message(i, message) for i, message in enumerate(body.messages)],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_response_format(body.response_format),
        template_kwargs=_template_kwargs(body),
        top_logprobs=_top_logprobs(body),
        sampling=openai.sampling_of(body),
    )
    return CanonicalRequest(
        dialect="chat",
        model=body.model or "",
        job=job,
        asked=openai.asked_for(body),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        user=body.user,
    )


def _message(i: int, given: _Message) -> Message:
    role = "system" if given.role == "developer" else given.role
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages.{i}.role: {role[:40]!r} is none of the roles", field=f"messages.{i}.role")
    content = given.content
    message: Message = {
        "role": role,
        "content": content if isinstance(content, str) else _parts(f"messages.{i}.content", content or []),
    }
    if given.name:
        message["name"] = given.name
    if role == "assistant":
        reasoning = given.reasoning_content or (given.reasoning if isinstance(given.reasoning, str) else "")
        if reasoning:
            message["reasoning_content"] = reasoning
        if given.tool_calls:
            message["tool_calls"] = [
                _call(f"messages.{i}.tool_calls.{j}", call) for j, call in enumerate(given.tool_calls)
            ]
    elif role == "tool" and given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    return message


def _parts(path: str, parts: list[Any]) -> str | list[dict[str, str]]:
    """Text parts as they came; one part is its text, none is "" (agents flatten such lists when they echo them)."""
    texts: list[dict[str, str]] = []
    for j, part in enumerate(parts):
        if isinstance(part, str):
            texts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            named = f"{kind[:40]!r} can't be read by this model" if isinstance(kind, str) else "must name a part's type"
            raise BadRequest(f"{path}.{j}.type: {named}; only text can", field=f"{path}.{j}.type")
        key = "refusal" if kind == "refusal" else "text"
        text = part.get(key)
        if not isinstance(text, str | None):
            raise BadRequest(f"{path}.{j}.{key}: expected a string", field=f"{path}.{j}.{key}")
        texts.append({"type": "text", "text": text or ""})
    if len(texts) > 1:
        return texts
    return texts[0]["text"] if texts else ""


def _call(path: str, given: _Call) -> dict[str, Any]:
    if given.function is None or not given.function.name:
        raise BadRequest(f"{path}.function.name is required", field=f"{path}.function.name")
    arguments = given.function.arguments
    if not isinstance(arguments, str):
        arguments = to_json(arguments or {}).decode()
    return {
        "id": given.id or "",
        "type": "function",
        "function": {"name": given.function.name, "arguments": arguments},
    }


def _tool(i: int, given: _Tool) -> Tool:
    if given.type != "function" or given.function is None:
        raise BadRequest(f"tools.{i}.type: only function tools can be served", field=f"tools.{i}.type")
    given_function = given.function
    if not given_function.name:
        raise BadRequest(f"tools.{i}.function.name is required", field=f"tools.{i}.function.name")
    function: dict[str, Any] = {"name": given_function.name}
    if given_function.description is not None:
        function["description"] = given_function.description
    if given_function.parameters is not None:
        check_wire(f"tools.{i}.function.parameters", given_function.parameters)
        function["parameters"] = given_function.parameters
    if given_function.strict is not None:
        function["strict"] = given_function.strict
    return {"type": "function", "function": function}


def _tool_choice(given: str | dict[str, Any] | None, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """The canonical choice, and the tools left to choose from."""
    if given is None:
        return "auto", tools
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            raise BadRequest(f"tool_choice: {given[:40]!r} is none of auto, none, required", field="tool_choice")
        if given == "required" and not tools:
            raise BadRequest("tool_choice is required, but there are no tools", field="tool_choice")
        return given, tools
    kind = given.get("type")
    if kind == "function":
        name = _name_of(given, "tool_choice")
        if not any(tool["function"]["name"] == name for tool in tools):
            raise BadRequest(f"tool_choice names {name[:80]!r}, which is no tool", field="tool_choice.function.name")
        return f"function:{name}", tools
    if kind == "allowed_tools":
        return _allowed(given.get("allowed_tools"), tools)
    raise BadRequest("tool_choice.type must be function or allowed_tools", field="tool_choice.type")


def _allowed(given: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    path = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or not isinstance(given.get("tools"), list):
        raise BadRequest(f"{path}.tools is required", field=f"{path}.tools")
    mode = given.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequest(f"{path}.mode must be auto or required", field=f"{path}.mode")
    names = {_name_of(tool, f"{path}.tools.{i}") for i, tool in enumerate(given["tools"])}
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    if not allowed:
        raise BadRequest(f"{path}.tools allows no tool that there is", field=f"{path}.tools")
    return mode, allowed


def _name_of(given: Any, path: str) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{path}.function.name is required", field=f"{path}.function.name")
    return name


def _response_format(given: _ResponseFormat | None) -> ResponseFormat:
    if given is None or given.type == "text":
        return ResponseFormat()
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    if given.type != "json_schema":
        raise BadRequest("response_format.type must be text, json_object or json_schema", field="response_format.type")
    asked = given.json_schema
    if asked is None or asked.schema is None:
        raise BadRequest("response_format.json_schema.schema is required", field="response_format.json_schema.schema")
    check_wire("response_format.json_schema.schema", asked.schema)
    return ResponseFormat("json_schema", asked.name or "", asked.schema, bool(asked.strict))


def _template_kwargs(body: _Body) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    check_wire("chat_template_kwargs", kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _top_logprobs(body: _Body) -> int | None:
    check_range("top_logprobs", body.top_logprobs, 0, 20)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    return None


# -- answer ---------------------------------------------------------------------------------------------------------------


def _message_out(message: Message) -> dict[str, Any]:
    """As OpenAI shows it: content is null beside tool calls, `refusal` is always there."""
    calls = message.get("tool_calls")
    out = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    return out


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.raw),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in token.top
            ],
        }
        for token in tokens
    ]


class ChatWriter:
    """`chat.completion.chunk` events. What is the same in every chunk of a stream is encoded once; a piece is spliced
    between (this is the hot path: about 1 us a chunk against 15 us for encoding a whole chunk anew)."""

    def __init__(self, request: CanonicalRequest, header: Header) -> None:
        self._wants_logprobs = request.job.top_logprobs is not None
        self._include_usage = request.include_usage
        constant = {
            "id": f"chatcmpl-{header.answer_id}",
            "object": "chat.completion.chunk",
            "created": header.created,
            "model": header.model,
            "system_fingerprint": None,
        }
        self._constant = b"data: " + to_json(constant)[:-1]
        self._heads = [
            self._constant + b',"choices":[{"index":%d,"delta":' % index for index in range(max(request.n, 1))
        ]
        usage = b',"usage":null' if request.include_usage else b""
        self._tail = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._usage_null = usage

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        return self._heads[index] + b'{"role":"assistant","content":""},"logprobs":null' + self._tail

    def piece(self, index: int, piece: Piece) -> bytes:
        if piece.content and not (piece.reasoning or piece.tool_calls):
            delta = b'{"content":' + to_json(piece.content) + b"}"
        else:
            delta = _delta(piece)
            if delta == b"{}" and not (self._wants_logprobs and piece.tokens):
                return b""
        logprobs = _logprobs_json(piece.tokens) if self._wants_logprobs and piece.tokens else b',"logprobs":null'
        return self._heads[index] + delta + logprobs + self._tail

    def finish(self, choice: Choice) -> bytes:
        reason = to_json(choice.finish_reason)
        return (
            self._heads[choice.index] + b'{},"logprobs":null,"finish_reason":' + reason
            + b"}]" + self._usage_null + b"}\n\n"
        )  # fmt: skip

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return openai.DONE
        usage = to_json(openai.usage(choices))
        return self._constant + b',"choices":[],"usage":' + usage + b"}\n\n" + openai.DONE


def _delta(piece: Piece) -> bytes:
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.content:
        delta["content"] = piece.content
    if piece.tool_calls:
        delta["tool_calls"] = [_call_piece(call) for call in piece.tool_calls]
    return to_json(delta)


def _call_piece(call: ToolCallPiece) -> dict[str, Any]:
    """The first fragment of a call carries its id, type and name; later ones only arguments."""
    if call.id or call.name:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> bytes:
    return b',"logprobs":' + to_json({"content": _logprobs(tokens), "refusal": None})
