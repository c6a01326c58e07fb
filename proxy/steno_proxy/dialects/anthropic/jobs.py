"""Anthropic Messages, the request -> the canonical one: how tools are chosen, sampling. `blocks.py` has what its blocks become,
`offers.py` which tools there are."""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import THINKS, CanonicalRequest, Job, ResponseFormat, Sampling, Tool
from steno.contracts.errors import BadRequest
from steno_proxy.dialects import bounds
from steno_proxy.dialects.anthropic.blocks import MessageBody, messages_of, system_of
from steno_proxy.dialects.anthropic.offers import OfferedTools
from steno_proxy.dialects.base import check_wire
from steno_proxy.dialects.bounds import MAX_TOKENS
from steno_proxy.dialects.parts import SeenParts
from steno_proxy.dialects.refusals import must_be, nothing_said

MAX_STOP_SEQUENCES = 64
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences")
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The provider's words for effort, as the templates that know `reasoning_effort` spell them."""


class MessagesBody(msgspec.Struct):
    """What is read of a request; unknown fields are ignored, null counts as absent."""

    messages: list[MessageBody]
    model: str | None = None
    system: str | list[Any] | None = None
    max_tokens: bounds.Limit | None = None
    temperature: bounds.Temperature | None = None
    top_p: bounds.TopP | None = None
    top_k: bounds.TopK | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def canonical(body: MessagesBody, *, complete: bool = True) -> CanonicalRequest:
    """Args: complete: an answer is wanted; False: only what the prompt is made of counts (`count_tokens`).

    Raises: BadRequest naming the field.
    """
    if not body.messages:
        raise BadRequest("messages: at least one message is required", field="messages")
    seen = SeenParts()
    offered = OfferedTools(body.tools or [], seen)
    messages = system_of(body.system, seen)
    for i, message in enumerate(body.messages):
        messages += messages_of(f"messages.{i}", message, seen, offered)
    if not messages:
        raise nothing_said()
    if complete:
        offered.check_runnable()
    tools = offered.tools
    choice, parallel = _tool_choice(body.tool_choice, tools)
    job = Job(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(body),
        template_kwargs=_template_kwargs(body),
        sampling=_sampling(body),
    )
    return CanonicalRequest(
        dialect="messages",
        model=body.model or "",
        job=job,
        asked={name: value for name in _SAMPLING if (value := getattr(body, name)) is not None},
        stream=bool(body.stream),
        dropped=seen.dropped,
        images=seen.images,
        merges=True,
        prefills=messages[-1]["role"] == "assistant",
        hides_reasoning=(body.thinking or {}).get("type") not in ("enabled", "adaptive"),
    )


# -- tools ----------------------------------------------------------------------------------------------------------------


def _tool_choice(given: dict[str, Any] | None, tools: list[Tool]) -> tuple[str, bool]:
    """The canonical choice, and whether parallel calls are allowed."""
    if given is None:
        return "auto", True
    kind, parallel = given.get("type"), given.get("disable_parallel_tool_use") is not True
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any":
        if not tools:
            raise BadRequest("tool_choice.type: got 'any', but the request has no tools", field="tool_choice")
        return "required", parallel
    if kind == "tool":
        name = given.get("name")
        if not isinstance(name, str) or not any(tool["function"]["name"] == name for tool in tools):
            raise must_be("the name of a tool that is offered and that the client runs", "tool_choice.name", name)
        return f"function:{name}", parallel
    raise must_be("one of auto, any, tool, none", "tool_choice.type", kind)


# -- the rest -------------------------------------------------------------------------------------------------------------


def _format(body: MessagesBody) -> ResponseFormat:
    given = body.output_format or (body.output_config or {}).get("format")
    if given is None:
        return ResponseFormat()
    path = "output_format" if body.output_format else "output_config.format"
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(schema, dict):
        raise BadRequest(f"{path} must be a json_schema with its schema", field=path)
    check_wire(f"{path}.schema", schema)
    return ResponseFormat("json_schema", "", schema, True)


def _template_kwargs(body: MessagesBody) -> dict[str, Any]:
    """What models call thinking and effort. `adaptive` leaves it to the model, as without the field."""
    kwargs: dict[str, Any] = {}
    kind = (body.thinking or {}).get("type")
    if kind in ("enabled", "disabled"):
        kwargs |= dict.fromkeys(THINKS, kind == "enabled")
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str) and effort in _EFFORTS:
        kwargs["reasoning_effort"] = _EFFORTS[effort]
    return kwargs


def _sampling(body: MessagesBody) -> Sampling:
    stops = body.stop_sequences or []
    if len(stops) > MAX_STOP_SEQUENCES:
        raise BadRequest(f"stop_sequences: at most {MAX_STOP_SEQUENCES} are allowed", field="stop_sequences")
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        max_tokens=min(body.max_tokens, MAX_TOKENS) if body.max_tokens is not None else None,
        stop=[stop for stop in stops if stop],
    )
