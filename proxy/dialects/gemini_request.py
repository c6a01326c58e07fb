"""Gemini's contents, tools and generation config -> the canonical request.

What clients do, and what follows from it:

    one `model` content per streamed chunk     neighbours are one assistant message, their texts joined as they are
    function calls without ids                 the id comes from our `thoughtSignature`, else from the place in the conversation
    function responses without ids             they answer, in order, the calls of that name before them
    thoughts, echoed or not                    reasoning; it does not decide which conversation this is

A part or tool of a type that a model here can't know (executable code, Google Search) is left out and named in `dropped`; images
and files are a 400 naming the part.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from proxy.contracts.canonical import Job, Message, ResponseFormat, Sampling, Tool
from proxy.contracts.errors import BadRequest
from proxy.dialects.base import check_wire
from proxy.dialects.gemini_fields import Fields
from proxy.dialects.gemini_schema import json_schema
from proxy.dialects.openai import MAX_CHOICES, MAX_TOKENS, to_json

UNPARSED = "__unparsedToolInput"
"""The one argument of a call whose arguments are no JSON object: `args` can only be one."""
SAMPLING_FIELDS = (
    "temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed", "presencePenalty",
    "frequencyPenalty",
)  # fmt: skip
_BESIDE = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})
_BESIDE_TOOLS = frozenset({"functionDeclarations", "function_declarations"})


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


# -- the conversation -----------------------------------------------------------------------------------------------------


def messages_of(body: Fields, dropped: list[str]) -> list[Message]:
    """Raises: BadRequest naming the part that can't be read."""
    reader = _Reader(dropped)
    system = body.get("systemInstruction")
    if system is not None:
        reader.system(Fields({"parts": [{"text": system}]} if isinstance(system, str) else system, "systemInstruction"))
    contents = body.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        raise BadRequest("contents is required, as a list that is not empty", field="contents")
    for i, content in enumerate(contents):
        reader.content(Fields(content, f"contents.{i}"))
    return reader.messages


class _Reader:
    def __init__(self, dropped: list[str]) -> None:
        self.messages: list[Message] = []
        self._dropped = dropped
        self._open: list[tuple[str, str]] = []  # (id, name) of calls without a result, of the last assistant message

    def system(self, content: Fields) -> None:
        texts = self._texts(content)
        if texts:
            self.messages.append({"role": "system", "content": _content(texts)})

    def content(self, content: Fields) -> None:
        role = content.text("role") or "user"
        if role == "model":
            self._model(content)
        elif role in ("user", "function", "tool"):
            self._user(content)
        elif role == "system":
            self.system(content)
        else:
            raise content.refuse("role", f"{role[:40]!r} is neither user nor model")

    def _model(self, content: Fields) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            message = self.messages[-1]
        else:
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
            self._open = []
        for part in content.each("parts"):
            kind = self._kind(part)
            if kind == "text":
                key = "reasoning_content" if part.flag("thought") else "content"
                text = part.text("text") or ""
                if text:
                    message[key] = message.get(key, "") + text
            elif kind == "functionCall":
                message.setdefault("tool_calls", []).append(self._call(part))
            elif kind == "functionResponse":
                raise part.refuse("functionResponse", "belongs into a content of the user")

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
        self._open.append((call_id, name))
        text = raw if isinstance(raw, str) else to_json(arguments).decode()
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _user(self, content: Fields) -> None:
        """Results first, whatever their place among the parts: templates want them right after their calls."""
        texts = []
        answered = False
        for part in content.each("parts"):
            kind = self._kind(part)
            if kind == "text":
                texts.append(part.text("text") or "")
            elif kind == "functionResponse":
                self.messages.append(self._result(Fields(part.get("functionResponse"), part.at("functionResponse"))))
                answered = True
            elif kind == "functionCall":
                raise part.refuse("functionCall", "belongs into a content of the model")
        if texts or not answered:
            self.messages.append({"role": "user", "content": _content(texts)})

    def _result(self, result: Fields) -> Message:
        name = result.text("name") or ""
        for part in result.each("parts"):
            self._kind(part)
        response = result.sub("response", {}).given
        given = result.text("id") or ""
        match = next((call for call in self._open if call[0] == given), None) if given else None
        if not given:
            match = next((call for call in self._open if call[1] == name), self._open[0] if self._open else None)
        if match is not None:
            self._open.remove(match)
        message: Message = {"role": "tool", "content": _said(response)}
        if call_id := given or (match[0] if match else ""):
            message["tool_call_id"] = call_id
        if name or match:
            message["name"] = name or (match[1] if match else "")
        return message

    def _texts(self, content: Fields) -> list[str]:
        return [part.text("text") or "" for part in content.each("parts") if self._kind(part) == "text"]

    def _kind(self, part: Fields) -> str:
        """`text`, `functionCall`, `functionResponse`, or "" for what is left out. Raises: BadRequest: an image or a file."""
        for kind in ("functionCall", "functionResponse", "text"):
            if part.get(kind) is not None:
                return kind
        for kind in ("inlineData", "fileData"):
            if part.get(kind) is not None:
                raise part.refuse(kind, "can't be read by this model; only text can")
        unknown = [name for name, value in part.given.items() if value is not None and _camel(name) not in _BESIDE]
        if unknown:
            self._dropped.append(unknown[0])
        return ""


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""


def _said(response: dict[str, Any]) -> str:
    """A function's result as text: the output itself where it is one, else JSON. `result` is what Google's SDK calls it."""
    if len(response) == 1 and isinstance(said := response.get("output", response.get("result")), str):
        return said
    return to_json(response).decode()


# -- tools ----------------------------------------------------------------------------------------------------------------


def tools_of(body: Fields, dropped: list[str]) -> tuple[list[Tool], str]:
    """The functions to choose from, and the canonical choice. Tools that only Google can run are dropped.

    Raises: BadRequest naming the field.
    """
    tools: list[Tool] = []
    for given in body.each("tools"):
        dropped += [name for name, value in given.given.items() if value is not None and name not in _BESIDE_TOOLS]
        tools += [_tool(declared) for declared in given.each("functionDeclarations")]
    config = body.sub("toolConfig", {}).sub("functionCallingConfig", {})
    mode = (config.text("mode") or "AUTO").upper()
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise config.refuse("mode", f"{mode[:40]!r} is none of AUTO, ANY, NONE, VALIDATED")
    if mode == "NONE":
        return tools, "none"
    if mode == "ANY" and not tools:
        raise config.refuse("mode", "ANY needs functions to call")
    allowed = config.texts("allowedFunctionNames")
    names = {tool["function"]["name"] for tool in tools}
    for i, name in enumerate(allowed):
        if name not in names:
            raise config.refuse(f"allowedFunctionNames.{i}", f"{name[:80]!r} is no function that is declared")
    if not allowed or mode not in ("ANY", "VALIDATED"):
        return tools, "required" if mode == "ANY" else "auto"
    if mode == "ANY" and len(set(allowed)) == 1:
        return tools, f"function:{allowed[0]}"
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
    temperature = config.number("temperature", 0.0, 100.0)
    top_p = config.number("topP", 0.0, 1.0)
    if top_p == 0.0:
        raise config.refuse("topP", "must be above 0")
    stops = config.texts("stopSequences")
    if len(stops) > 16:
        raise config.refuse("stopSequences", "takes at most 16 strings")
    limit = config.integer("maxOutputTokens", 1, 2**63 - 1)
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=config.integer("topK", 0, 2**31 - 1) or 0,
        presence_penalty=float(config.number("presencePenalty", -2.0, 2.0) or 0.0),
        frequency_penalty=float(config.number("frequencyPenalty", -2.0, 2.0) or 0.0),
        max_tokens=min(limit, MAX_TOKENS) if limit is not None else None,
        seed=config.integer("seed", -(2**63), 2**63 - 1),
        stop=[stop for stop in stops if stop],
    )


def response_format_of(config: Fields) -> ResponseFormat:
    mime = config.text("responseMimeType") or "text/plain"
    if mime not in ("text/plain", "application/json"):
        raise config.refuse("responseMimeType", f"{mime[:60]!r} is neither text/plain nor application/json")
    for modality in config.texts("responseModalities"):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise config.refuse("responseModalities", "only the modality TEXT can be served")
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
    if thinking.integer("thinkingBudget", -1, 2**31 - 1) == 0:
        options["enable_thinking"] = False
    level = thinking.text("thinkingLevel")
    if level and level != "THINKING_LEVEL_UNSPECIFIED":
        options["reasoning_effort"] = level.lower()
    return options, bool(thinking.flag("includeThoughts"))


def top_logprobs_of(config: Fields) -> int | None:
    top = config.integer("logprobs", 0, 20)
    if config.flag("responseLogprobs"):
        return top or 0
    if top:
        raise config.refuse("logprobs", "needs responseLogprobs: true")
    return None


def job_of(body: Fields, dropped: list[str]) -> tuple[Job, bool]:
    """The job, and whether the client wants to see thoughts. Raises: BadRequest naming the field."""
    if body.text("cachedContent"):
        raise body.refuse("cachedContent", "there is no stored content here: send it whole")
    config = body.sub("generationConfig", {})
    tools, choice = tools_of(body, dropped)
    options, thoughts = template_options_of(config)
    job = Job(
        messages=messages_of(body, dropped),
        tools=tools,
        tool_choice=choice,
        response_format=response_format_of(config),
        template_kwargs=options,
        top_logprobs=top_logprobs_of(config),
        sampling=sampling_of(config),
    )
    return job, thoughts


def asked_for(config: Fields) -> dict[str, Any]:
    """The sampling fields that the client sent, as it sent them."""
    return {name: value for name in SAMPLING_FIELDS if (value := config.get(name)) is not None}


def choices_of(config: Fields) -> int:
    return config.integer("candidateCount", 1, MAX_CHOICES) or 1
