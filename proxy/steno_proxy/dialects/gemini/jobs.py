"""Gemini's request -> the canonical one: its functions, how they are chosen, and its generation config. Contents are
`contents.py`.

Tools that only Google can run (search, code execution) are left out and named in `dropped`.
"""

from __future__ import annotations

from typing import Any

from steno.contracts.chat import THINKS, Job, ResponseFormat, Sampling, Tool
from steno_proxy.dialects import bounds
from steno_proxy.dialects.base import check_wire
from steno_proxy.dialects.bounds import MAX_TOKENS
from steno_proxy.dialects.gemini.contents import messages_of
from steno_proxy.dialects.gemini.fields import Fields
from steno_proxy.dialects.gemini.schema import json_schema
from steno_proxy.dialects.parts import SeenParts
from steno_proxy.dialects.refusals import nobody_runs

SAMPLING_FIELDS = (
    "temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed", "presencePenalty",
    "frequencyPenalty",
)  # fmt: skip
_BESIDE_TOOLS = frozenset({"functionDeclarations", "function_declarations"})


# -- tools ----------------------------------------------------------------------------------------------------------------


def tools_of(body: Fields, seen: SeenParts, *, complete: bool = True) -> tuple[list[Tool], str]:
    """The functions to choose from, and the canonical choice. Tools that only Google can run are dropped.

    Args: complete: an answer is wanted: then a request whose tools are all dropped is refused.
    Raises: BadRequest naming the field.
    """
    tools: list[Tool] = []
    dropped: list[tuple[Fields, str]] = []
    for given in body.each("tools"):
        dropped += [
            (given, name) for name, value in given.given.items() if value is not None and name not in _BESIDE_TOOLS
        ]
        tools += [_tool(declared) for declared in given.each("functionDeclarations")]
    if dropped and not tools and complete:
        given, name = dropped[0]
        raise nobody_runs(given.path, name)
    seen.dropped += [name for _, name in dropped]
    config = body.sub("toolConfig", {}).sub("functionCallingConfig", {})
    mode = (config.text("mode") or "AUTO").upper()
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise config.refuse("mode", f"got {mode[:40]!r}, must be one of AUTO, ANY, NONE, VALIDATED")
    if mode == "NONE":
        return tools, "none"
    if mode == "ANY" and not tools:
        raise config.refuse("mode", "got 'ANY', but the request declares no functions")
    listed = config.texts("allowedFunctionNames")
    names = {tool["function"]["name"] for tool in tools}
    for i, name in enumerate(listed):
        if name not in names:
            raise config.refuse(f"allowedFunctionNames.{i}", f"no declared function is named {name[:80]!r}")
    allowed = set(listed)
    if not allowed or mode not in ("ANY", "VALIDATED"):
        return tools, "required" if mode == "ANY" else "auto"
    if mode == "ANY" and len(allowed) == 1:
        return tools, f"function:{listed[0]}"
    return [tool for tool in tools if tool["function"]["name"] in allowed], "required" if mode == "ANY" else "auto"


def _tool(declared: Fields) -> Tool:
    name = declared.text("name")
    if not name:
        raise declared.refuse("name", "is required")
    function: dict[str, Any] = {"name": name}
    if (description := declared.text("description")) is not None:
        function["description"] = description
    if (plain := declared.sub("parametersJsonSchema")) is not None:
        function["parameters"] = plain.given
    elif (parameters := declared.get("parameters")) is not None:
        function["parameters"] = json_schema(parameters, declared.at("parameters"))
    check_wire(declared.at("parameters"), function.get("parameters"))
    return {"type": "function", "function": function}


# -- generation config ----------------------------------------------------------------------------------------------------


def sampling_of(config: Fields) -> Sampling:
    """Raises: BadRequest naming the field that is out of range."""
    temperature = config.number("temperature", bounds.Temperature)
    top_p = config.number("topP", bounds.TopP)
    stops = config.texts("stopSequences")
    if len(stops) > 16:
        raise config.refuse("stopSequences", "takes at most 16 strings")
    limit = config.integer("maxOutputTokens", bounds.Limit)
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=config.integer("topK", bounds.PlainTopK) or 0,
        presence_penalty=float(config.number("presencePenalty", bounds.Penalty) or 0.0),
        frequency_penalty=float(config.number("frequencyPenalty", bounds.Penalty) or 0.0),
        max_tokens=min(limit, MAX_TOKENS) if limit is not None else None,
        seed=config.integer("seed", bounds.Seed),
        stop=[stop for stop in stops if stop],
    )


def response_format_of(config: Fields) -> ResponseFormat:
    mime = config.text("responseMimeType") or "text/plain"
    if mime not in ("text/plain", "application/json"):
        raise config.refuse("responseMimeType", f"got {mime[:60]!r}, must be text/plain or application/json")
    for modality in config.texts("responseModalities"):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise config.refuse("responseModalities", "only TEXT is supported")
    schema = config.get("responseJsonSchema")
    name = "responseJsonSchema"
    if schema is None and (given := config.get("responseSchema")) is not None:
        name = "responseSchema"
        schema = json_schema(given, config.at(name))
    if schema is None:
        return ResponseFormat("json_object") if mime == "application/json" else ResponseFormat()
    schema = Fields(schema, config.at(name)).given
    check_wire(config.at(name), schema)
    return ResponseFormat("json_schema", "response", schema)


def template_options_of(config: Fields) -> tuple[dict[str, Any], bool]:
    """What the chat template is told about thinking, and whether the client wants to see the thoughts."""
    thinking = config.sub("thinkingConfig", {})
    options: dict[str, Any] = {}
    if thinking.integer("thinkingBudget", bounds.ThinkingBudget) == 0:
        options |= dict.fromkeys(THINKS, False)
    level = thinking.text("thinkingLevel")
    if level and level != "THINKING_LEVEL_UNSPECIFIED":
        options["reasoning_effort"] = level.lower()
    return options, bool(thinking.flag("includeThoughts"))


def top_logprobs_of(config: Fields) -> int | None:
    top = config.integer("logprobs", bounds.TopLogprobs)
    if config.flag("responseLogprobs"):
        return top or 0
    if top:
        raise config.refuse("logprobs", "needs responseLogprobs: true")
    return None


def job_of(body: Fields, seen: SeenParts, *, complete: bool = True) -> tuple[Job, bool]:
    """The job, and whether the client wants to see thoughts.

    Args: complete: an answer is wanted; False: only what the prompt is made of counts (`countTokens`).
    Raises: BadRequest naming the field.
    """
    if body.text("cachedContent"):
        raise body.refuse("cachedContent", "is not supported: send the whole content in contents")
    config = body.sub("generationConfig", {})
    tools, choice = tools_of(body, seen, complete=complete)
    options, thoughts = template_options_of(config)
    job = Job(
        messages=messages_of(body, seen),
        tools=tools,
        tool_choice=choice,
        response_format=response_format_of(config),
        template_kwargs=options,
        top_logprobs=top_logprobs_of(config),
        sampling=sampling_of(config),
    )
    return job, thoughts


def requested_sampling(config: Fields) -> dict[str, Any]:
    """The sampling fields that the client sent, as it sent them."""
    return {name: value for name in SAMPLING_FIELDS if (value := config.get(name)) is not None}


def choices_of(config: Fields) -> int:
    return config.integer("candidateCount", bounds.Choices) or 1
