"""OpenAI Responses: `POST /{trial_id}/v1/responses`, streamed and not; what counts a request's tokens, and what makes a
conversation short.

Items become messages in `items.py`, tools functions in `tools.py`; answers become items in
`output.py` and events in `events.py`. A response's id is `resp_<turn_id>`, so that nothing is
stored twice: with `store` (the default) the turn's record keeps what little of the request it would not hold
otherwise, `previous_response_id` and `GET` read the rest from it.

`strict` is taken as sent (OpenAI's own default, strict tools, would put most turns under a grammar: I1). What would
change an answer's meaning and can't be honoured (`background`, `conversation`, `prompt`) is refused by name;
everything else unknown is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from steno.contracts.chat import RECORDED, CanonicalRequest, Job, Message, ResponseFormat
from steno.contracts.errors import BadRequest, NotFound, PreviousNotFound, StenoError
from steno_proxy.dialects import bounds
from steno_proxy.dialects.base import Choice, Header, Writer, check_wire, decode
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.openai.structured import format_of
from steno_proxy.dialects.parts import SeenParts
from steno_proxy.dialects.refusals import must_be
from steno_proxy.dialects.responses.compaction import (
    ASK,
    CompactionWriter,
    compacted_body,
    is_triggered,
    triggered_body,
)
from steno_proxy.dialects.responses.events import ResponsesWriter
from steno_proxy.dialects.responses.items import read_items
from steno_proxy.dialects.responses.output import ResponsesRequest, body_of
from steno_proxy.dialects.responses.schema import COMPACT, COUNT, RESPONSES
from steno_proxy.dialects.responses.tools import Tools, read_tools, tools_in_response

_NO_TOOLS = {"type": "additional_tools", "tools": list[Any]()}
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{12})\Z")


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _ResponsesBody(common.SamplingBody, kw_only=True):
    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    max_output_tokens: bounds.Limit | None = None
    max_tool_calls: bounds.Limit | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


_decoder = msgspec.json.Decoder(_ResponsesBody)


def turn_of_response(response_id: str) -> str:
    """The turn that a response's id names. Raises: NotFound: no response of ours has such an id."""
    found = _RESPONSE_ID.match(response_id)
    if found is None:
        raise NotFound(f"Response with id '{response_id[:80]}' not found.", field="response_id")
    return found[1]


class ResponsesDialect:
    """The dialect. Stateless."""

    name: ClassVar[str] = "responses"
    paths: ClassVar[tuple[str, ...]] = ("/v1/responses",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = common.KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        asked = decode(_decoder, body)
        return _compacting(asked) if is_triggered(asked.input) else canonical(asked)

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        assert isinstance(request, ResponsesRequest)
        return (CompactionWriter if request.compacts else ResponsesWriter)(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        assert isinstance(request, ResponsesRequest)
        return to_json((triggered_body if request.compacts else body_of)(request, header, choices[0]))

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def broken(self, error: StenoError) -> bytes:
        """Nothing: what ends a stream is its writer's to say, which knows the response."""
        return b""

    def openapi(self) -> dict[str, Any]:
        return RESPONSES


class ResponsesCount:
    """`POST …/responses/input_tokens`: how long a request's prompt is. It counts what the request holds: recorded conversations
    are not looked up for it."""

    name: ClassVar[str] = "responses"

    def parse_count(self, body: bytes) -> CanonicalRequest:
        asked = canonical(decode(_decoder, body), complete=False)
        for field, given in (("previous_response_id", asked.after), ("input", asked.refers)):
            if given:
                raise BadRequest(
                    f"{field} is not supported when tokens are counted: send its items in input", field=field
                )
        return asked

    def count_answer(self, tokens: int) -> bytes:
        return to_json({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def openapi(self) -> dict[str, Any]:
        return COUNT


class ResponsesCompact(ResponsesDialect):
    """`POST …/responses/compact`: a conversation made short (`compaction.py`). Never streamed."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/responses/compact",)

    def parse(self, body: bytes) -> CanonicalRequest:
        asked = decode(_decoder, body)
        if not asked.model:
            raise BadRequest("model is required", field="model")
        asked.stream = False
        return _compacting(asked)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        return to_json(compacted_body(header, choices[0]))

    def openapi(self) -> dict[str, Any]:
        return COMPACT


def _compacting(asked: _ResponsesBody) -> ResponsesRequest:
    """The request for a summary that a body is: never stored, without tools."""
    if isinstance(asked.input, list):
        if is_triggered(asked.input):
            asked.input.pop()
        asked.input = [_NO_TOOLS if _has_tools(item) else item for item in asked.input]
    asked.store = False
    asked.tools = asked.tool_choice = asked.text = None
    request = canonical(asked, last={"role": "user", "content": ASK})
    request.compacts = True
    return request


def _has_tools(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "additional_tools"


def empty_response(model: str, created: int) -> bytes:
    """The events of a response for which nothing was generated, and nothing recorded. Its id is "": no other can go on from it,
    and Codex, which would, sends all of its items again instead."""
    writer = ResponsesWriter(canonical(_ResponsesBody(input="-", store=False)), Header("", created, model))
    return writer.begin(0, 0, 0) + writer.end([Choice(0, {"role": "assistant", "content": ""}, "stop", 0, 0)])


def canonical(body: _ResponsesBody, last: Message | None = None, *, complete: bool = True) -> ResponsesRequest:
    """The request that a body is.

    Args: last: comes after all of its messages, and after those that it goes on from. complete: an answer is wanted; False: only
        what the prompt is made of counts.
    Raises: BadRequest with the dotted path of the field to blame.
    """
    common.check_fields(body, "responses")
    if body.conversation:
        raise BadRequest(
            "conversation is not supported: send the items in input, or use previous_response_id", field="conversation"
        )
    if body.n not in (None, 1):
        raise BadRequest(f"n: got {body.n}, must be 1", field="n")
    tools = read_tools(body.tools or [], body.input)
    include, reasoning = body.include or [], body.reasoning or _Reasoning()
    seen = SeenParts(dropped=tools.dropped)
    after = ""
    if body.previous_response_id is not None:
        after = _previous(body.previous_response_id)
    asked = common.requested_sampling(body)
    if body.max_output_tokens is not None:
        asked["max_output_tokens"] = body.max_output_tokens
    instructions = _instructions(body, tools, seen)
    job = Job(
        messages=instructions + _input(body, tools, seen),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=format_of(body, _response_format(body.text), "text.format"),
        template_kwargs=_template_kwargs(body, reasoning),
        top_logprobs=_top_logprobs(body, include),
        sampling=common.sampling_of(body, default_max_tokens=body.max_output_tokens),
        shows_stop=bool(body.include_stop_str_in_output),
        shows_special=body.skip_special_tokens is False,
    )
    if not (job.messages or (last is not None and after)):
        raise BadRequest("input must not be empty", field="input")
    if last is not None:
        job.messages.append(last)
    request = ResponsesRequest(
        dialect="responses",
        model=body.model or "",
        job=job,
        asked=asked,
        stream=bool(body.stream),
        dropped=seen.dropped,
        images=seen.images,
        after=after,
        leading=len(instructions),
        refers=any(RECORDED in message for message in job.messages),
        tools=tools,
        tool_choice=body.tool_choice,
        summary=bool(reasoning.summary or reasoning.generate_summary),
        sealed="reasoning.encrypted_content" in include,
        echo=_echo(body, reasoning),
    )
    if body.store is not False:
        request.kept = _kept(request, body)
    if not after:  # else there may be more tools, see `goes_on_from`
        request.offer(complete=complete)
    return request


def _previous(response_id: str) -> str:
    try:
        return turn_of_response(response_id)
    except NotFound:
        raise PreviousNotFound(
            f"Previous response with id '{response_id[:80]}' not found.", field="previous_response_id"
        ) from None


def _instructions(body: _ResponsesBody, tools: Tools, seen: SeenParts) -> list[Message]:
    if isinstance(body.instructions, list):
        return read_items("instructions", body.instructions, tools, seen)
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _input(body: _ResponsesBody, tools: Tools, seen: SeenParts) -> list[Message]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return read_items("input", body.input or [], tools, seen)


def _response_format(text: _Text | None) -> ResponseFormat:
    given = text.format if text is not None else None
    if given is None or given.type == "text":
        return ResponseFormat()
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    if given.type != "json_schema":
        raise must_be("one of text, json_object, json_schema", "text.format.type", given.type)
    if given.schema is None:
        raise BadRequest("text.format.schema is required", field="text.format.schema")
    check_wire("text.format.schema", given.schema)
    return ResponseFormat("json_schema", given.name or "", given.schema, bool(given.strict))


def _template_kwargs(body: _ResponsesBody, reasoning: _Reasoning) -> dict[str, Any]:
    kwargs = common.template_kwargs_of(body.chat_template_kwargs)
    if reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning.effort)
    return kwargs


def _top_logprobs(body: _ResponsesBody, include: list[str]) -> int | None:
    return (body.top_logprobs or 0) if body.top_logprobs or "message.output_text.logprobs" in include else None


def _echo(body: _ResponsesBody, reasoning: _Reasoning) -> dict[str, Any]:
    """What a response repeats of its request."""
    text: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        given = body.text.format
        text = {"type": given.type}
        if given.type == "json_schema":
            text |= {"name": given.name or "", "schema": given.schema, "strict": bool(given.strict)}
    return {
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": body.presence_penalty or 0.0,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": body.safety_identifier,
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools_in_response(body.tools or []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "user": body.user,
    }


def _kept(request: ResponsesRequest, body: _ResponsesBody) -> dict[str, Any]:
    """What a stored response needs and the rest of the turn's record does not say, beside what its request carries. Only what
    differs from the defaults, and nothing that differs from turn to turn: this is stored once for all turns that have it in
    common."""
    kept: dict[str, Any] = {"stored": True}
    if request.after:
        kept["after"] = True
    if request.summary:
        kept["summary"] = request.echo["reasoning"]["summary"]
    if request.sealed:
        kept["sealed"] = True
    for name in ("metadata", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user"):
        if value := getattr(body, name):
            kept[name] = value
    check_wire("metadata", body.metadata)
    return kept
