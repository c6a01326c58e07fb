"""OpenAI Chat Completions, the request -> the canonical one.

What a client may send is honoured or refused by name; what it does not know of (unknown fields, at every level) is ignored.
`developer` is `system`; null, absent and "" content are the same, and an assistant's `refusal` is its text then; content parts
are texts, of users and tools images too, of assistants reasoning (anything else is a 400 naming the part: what a user sent must
not vanish). Clients echo `reasoning_content` (some say `reasoning`), which is taken as it is. Which tools there are is
`chat_tools.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import CONTINUES, OPEN_END, THINKS, CanonicalRequest, Job, Message
from steno.contracts.errors import BadRequest
from steno_proxy.dialects import bounds
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.chat_tools import ChatTools, ToolBody, are_tools, tool_choice_of
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.openai.structured import ResponseFormatBody, format_of, response_format_of
from steno_proxy.dialects.parts import Part, SeenParts, content_of, text_part, thought_of
from steno_proxy.dialects.refusals import must_be, nothing_said


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
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tools: Any = None


class ChatBody(common.SamplingBody, kw_only=True):
    messages: list[_Message]
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatBody | None = None
    logprobs: bool | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Any = None
    enable_thinking: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None


def canonical(body: ChatBody) -> CanonicalRequest:
    """Raises: BadRequest with the dotted path of the field to blame."""
    if not body.messages:
        raise must_be("a list of at least one", "messages", body.messages)
    common.check_fields(body, "chat")
    if body.functions:
        raise BadRequest("functions is deprecated and not supported: use tools", field="functions")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest(f"modalities: got {body.modalities[:3]}, must be ['text']", field="modalities")
    seen = SeenParts()
    given = ChatTools(body.tools or [], seen)
    messages = [
        _message(i, message, seen) for i, message in enumerate(body.messages) if not _only_tools(i, message, given)
    ]
    if not messages:
        raise nothing_said()
    given.check_runnable()
    choice, tools = tool_choice_of(body.tool_choice, given.offered)
    job = Job(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=format_of(body, response_format_of(body.response_format), "response_format"),
        template_kwargs=_template_kwargs(body),
        top_logprobs=_top_logprobs(body),
        sampling=common.sampling_of(body),
        shows_stop=bool(body.include_stop_str_in_output),
        shows_special=body.skip_special_tokens is False,
    )
    request = common.request_of(body, "chat", job)
    request.hides_reasoning, request.images = body.include_reasoning is False, seen.images
    request.dropped = seen.dropped
    return request


def _only_tools(i: int, given: _Message, tools: ChatTools) -> bool:
    """Add the tools that a system message brings. Returns: whether it has nothing else. In other roles `tools` is ignored."""
    if not given.tools or given.role not in ("system", "developer") or not are_tools(given.tools):
        return False
    tools.add(f"messages.{i}.tools", given.tools)
    return not given.content


def _message(i: int, given: _Message, seen: SeenParts) -> Message:
    role = "system" if given.role == "developer" else given.role
    if role not in ("system", "user", "assistant", "tool"):
        roles = "system, developer, user, assistant, tool"
        raise BadRequest(f"messages.{i}.role: got {role[:40]!r}, must be one of {roles}", field=f"messages.{i}.role")
    content: Any = given.content
    thoughts: list[str] | None = [] if role == "assistant" else None
    if not isinstance(content, str):
        content = _content(
            f"messages.{i}.content", content or [], seen, images=role in ("user", "tool"), thoughts=thoughts
        )
    if role == "assistant" and given.refusal:
        content = content or given.refusal
    message: Message = {"role": role, "content": content}
    if given.name:
        message["name"] = given.name
    if role == "assistant":
        reasoning = given.reasoning_content or (given.reasoning if isinstance(given.reasoning, str) else "")
        reasoning = reasoning or "".join(thoughts or ())
        if reasoning:
            message["reasoning_content"] = reasoning
        if given.tool_calls:
            message["tool_calls"] = [
                _call(f"messages.{i}.tool_calls.{j}", call) for j, call in enumerate(given.tool_calls)
            ]
    elif role == "tool" and given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    return message


def _content(
    path: str, given: list[Any], seen: SeenParts, *, images: bool, thoughts: list[str] | None
) -> str | list[Part]:
    """images: whether they may stand here. thoughts: gets the texts of reasoning; None where there is none."""
    parts: list[Part] = []
    seen.strings(path, given)
    for j, part in enumerate(given):
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        if kind == "image_url" and images:
            parts.append(_image(f"{path}.{j}.image_url", part.get("image_url"), seen))
        elif thoughts is not None and (thought := thought_of(f"{path}.{j}", part)) is not None:
            thoughts.append(thought)
        else:
            parts.append(text_part(part if isinstance(part, str) else _text(f"{path}.{j}", kind, part)))
    return content_of(parts)


def _text(path: str, kind: Any, part: Any) -> str:
    if kind not in ("text", "input_text", "output_text", "refusal"):
        named = f"got {kind[:40]!r}" if isinstance(kind, str) else "is missing"
        raise BadRequest(
            f"{path}.type: {named}, must be text (image_url too in user and tool messages)", field=f"{path}.type"
        )
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str | None):
        raise must_be("a string", f"{path}.{key}", text)
    return text or ""


def _image(path: str, given: Any, seen: SeenParts) -> Part:
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


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """`thinking` as Moonshot, DeepSeek and Z.ai spell it, `enable_thinking` as DashScope does; another `type` leaves it to the
    model."""
    kwargs = common.template_kwargs_of(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    kind = body.thinking.get("type") if isinstance(body.thinking, dict) else None
    thinks = body.enable_thinking if isinstance(body.enable_thinking, bool) else None
    if thinks is None and kind in ("enabled", "disabled"):
        thinks = kind == "enabled"
    if thinks is not None and kwargs.keys().isdisjoint(THINKS):
        kwargs |= dict.fromkeys(THINKS, thinks)
    return kwargs | _end_of_prompt(body)


def _end_of_prompt(body: ChatBody) -> dict[str, Any]:
    """Where the prompt ends, if not after the header of an assistant's message."""
    if not body.continue_final_message:
        return {} if body.add_generation_prompt is not False else {OPEN_END: False}
    if body.add_generation_prompt is not False:
        raise BadRequest(f"{CONTINUES} needs {OPEN_END}: false", field=CONTINUES)
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content:
        raise BadRequest(
            f"{CONTINUES}: the last message must be an assistant's, with text and no calls", field=CONTINUES
        )
    return {OPEN_END: False, CONTINUES: True}


def _top_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    return None
