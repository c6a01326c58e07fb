"""OpenAI Chat Completions, the request -> the canonical one.

What a client may send is honoured or refused by name; what it does not know of (unknown fields, at every level) is ignored.
`developer` is `system`; null, absent and "" content are the same; content parts are texts and, of users and tools, images
(anything else is a 400 naming the part). `tool_choice: allowed_tools` offers the model the allowed tools only. Clients echo
`reasoning_content` (some say `reasoning`), which is taken as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contracts.canonical import CanonicalRequest, Job, Message, ResponseFormat, Tool
from proxy.contracts.errors import BadRequest
from proxy.dialects import openai
from proxy.dialects.base import check_range, check_wire
from proxy.dialects.openai import to_json
from proxy.dialects.parts import Part, Seen, content_of, text_part


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


class Body(openai.SamplingBody, kw_only=True):
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


def canonical(body: Body) -> CanonicalRequest:
    """Raises: BadRequest with the dotted path of the field to blame."""
    if not body.messages:
        raise BadRequest("messages must not be empty", field="messages")
    if body.functions:
        raise BadRequest("functions is the retired form: send tools", field="functions")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest("only the modality text can be served", field="modalities")
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    choice, tools = _tool_choice(body.tool_choice, tools)
    seen = Seen()
    job = Job(
        messages=[_message(i, message, seen) for i, message in enumerate(body.messages)],
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
        images=seen.images,
    )


def _message(i: int, given: _Message, seen: Seen) -> Message:
    role = "system" if given.role == "developer" else given.role
    if role not in ("system", "user", "assistant", "tool"):
        roles = "system, developer, user, assistant, tool"
        raise BadRequest(f"messages.{i}.role: {role[:40]!r} is none of {roles}", field=f"messages.{i}.role")
    content: Any = given.content
    if not isinstance(content, str):
        content = _content(f"messages.{i}.content", content or [], seen, images=role in ("user", "tool"))
    message: Message = {"role": role, "content": content}
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


def _content(path: str, given: list[Any], seen: Seen, *, images: bool) -> str | list[Part]:
    """images: whether they may stand here."""
    parts: list[Part] = []
    seen.strings(path, given)
    for j, part in enumerate(given):
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        if kind == "image_url" and images:
            parts.append(_image(f"{path}.{j}.image_url", part.get("image_url"), seen))
        else:
            parts.append(text_part(part if isinstance(part, str) else _text(f"{path}.{j}", kind, part)))
    return content_of(parts)


def _text(path: str, kind: Any, part: Any) -> str:
    if kind not in ("text", "input_text", "output_text", "refusal"):
        named = f"{kind[:40]!r} can't be read here" if isinstance(kind, str) else "must name a part's type"
        raise BadRequest(f"{path}.type: {named}; text can, and a user's or a tool's images", field=f"{path}.type")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str | None):
        raise BadRequest(f"{path}.{key}: expected a string", field=f"{path}.{key}")
    return text or ""


def _image(path: str, given: Any, seen: Seen) -> Part:
    if isinstance(given, dict):
        return seen.image(path, given.get("url"), given.get("detail"))
    return seen.image(path, given)


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


def _template_kwargs(body: Body) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    check_wire("chat_template_kwargs", kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _top_logprobs(body: Body) -> int | None:
    check_range("top_logprobs", body.top_logprobs, 0, 20)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    return None
