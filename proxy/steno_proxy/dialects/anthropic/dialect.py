"""Anthropic Messages: `POST /{trial_id}/v1/messages`, streamed and not, and what `count_tokens` answers.

An answer is a list of blocks: thinking (for clients that asked for it), text, then tool_use, each opened, filled and closed in
that order. A client may act on a closed block and keeps it when the stream breaks, so `closes` tells the turn when one is
about to be closed (I3). The `input` of a tool call is an object: arguments that are none are `{"__unparsedToolInput": "<as
sampled>"}`, which is how Claude Code sends such a call back. In a stream all arguments are held back until their block is
closed, since Anthropic's SDK fails on what is no JSON; until then each piece is an empty delta. Text of nothing but white space
is no block. Requests are `jobs.py`, the OpenAPI operations `schema.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from steno.contracts.chat import MERGED, CanonicalRequest, Message, ToolCallPiece, merged
from steno.contracts.errors import ContextOverflow, StenoError
from steno_proxy.dialects.anthropic.jobs import MessagesBody, canonical
from steno_proxy.dialects.anthropic.schema import COUNT_TOKENS, MESSAGES
from steno_proxy.dialects.base import Choice, Header, Piece, Writer, decode

to_json = msgspec.json.encode
KEEPALIVE = b": keepalive\n"
"""As in the OpenAI formats: a comment without an empty line after it, which no parser takes for an event."""
_decoder = msgspec.json.Decoder(MessagesBody)
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 409: "conflict_error", 410: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    502: "overloaded_error", 503: "overloaded_error",
}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NOTHING, _THINKING, _TEXT = -1, -2, -3
"""Which block is open: one of these, or the index of a tool call."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}}\n\n'
_HELD = b'{"type":"input_json_delta","partial_json":""'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'


class MessagesDialect:
    """The dialect. Stateless."""

    name: ClassVar[str] = "messages"
    paths: ClassVar[tuple[str, ...]] = ("/v1/messages",)
    call_prefix: ClassVar[str] = "toolu"
    keepalive: ClassVar[bytes] = KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        return canonical(decode(_decoder, body))

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return MessagesWriter(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        choice = choices[0]
        message = _message(header) | _ended(choice, request.job.sampling.stop)
        message["content"] = blocks(choice.message, header.answer_id, hides_reasoning=request.hides_reasoning)
        message["usage"] = _usage(choice.prompt_tokens, choice.cached_tokens, choice.completion_tokens)
        return to_json(message)

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return to_json(_error(error) | ({"request_id": request_id} if request_id else {}))

    def broken(self, error: StenoError) -> bytes:
        return b"event: error\ndata: " + to_json(_error(error)) + b"\n\n"

    def openapi(self) -> dict[str, Any]:
        return MESSAGES


class MessagesCount:
    """`…/v1/messages/count_tokens`: what a prompt weighs. Nothing is generated."""

    name: ClassVar[str] = MessagesDialect.name

    def parse_count(self, body: bytes) -> CanonicalRequest:
        """Raises: BadRequest naming the field."""
        asked = canonical(decode(_decoder, body), complete=False)
        asked.job = msgspec.structs.replace(asked.job, messages=merged(asked.job.messages, MERGED))
        return asked

    def count_answer(self, tokens: int) -> bytes:
        return to_json({"input_tokens": tokens})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return MessagesDialect().error(error, request_id)

    def openapi(self) -> dict[str, Any]:
        return COUNT_TOKENS


def blocks(message: Message, turn_id: str, *, hides_reasoning: bool = False) -> list[dict[str, Any]]:
    """The projection of a canonical assistant message onto this format."""
    found: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if reasoning and not hides_reasoning:
        found.append({"type": "thinking", "thinking": reasoning, "signature": signature(turn_id)})
    content = message["content"]
    if content and not content.isspace():
        found.append({"type": "text", "text": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        found.append(shown)
    return found


def signature(turn_id: str) -> str:
    """What closes a thinking block. Clients keep it and send it back; nobody reads it."""
    return base64.b64encode(b"steno:" + turn_id.encode()).decode()


def _input(arguments: str) -> Any:
    """The arguments as sampled if they are a JSON object: encoding them again might change a number."""
    if not arguments or arguments.isspace():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return msgspec.Raw(arguments.encode()) if isinstance(value, dict) else {"__unparsedToolInput": arguments}


def _message(header: Header) -> dict[str, Any]:
    return {
        "id": f"msg_{header.answer_id}", "type": "message", "role": "assistant", "model": header.model, "content": [],
        "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip


def _ended(choice: Choice, stops: Sequence[str]) -> dict[str, Any]:
    if choice.finish_reason == "stop" and choice.stop and choice.stop in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": _STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """`input_tokens` counts the prompt tokens that were not read from the cache: the sum of the three fields is the prompt."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _error(error: StenoError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _words(error)}}


def _words(error: StenoError) -> str:
    """Claude Code compacts when it reads `prompt is too long`; both numbers tell it by how much."""
    if not isinstance(error, ContextOverflow):
        return error.message
    if not error.prompt_alone:
        return f"prompt is too long: {error.message}"
    # Room for one token of the answer is asked for too, so a prompt may be as long as the context and still too long.
    maximum = min(error.context_tokens, error.prompt_tokens - 1)
    return f"prompt is too long: {error.prompt_tokens} tokens > {maximum} maximum"


class MessagesWriter:
    """Events of one streamed answer. What is the same in each delta of a block is encoded once: this is the hot path."""

    def __init__(self, request: CanonicalRequest, header: Header) -> None:
        self._header = header
        self._stops = request.job.sampling.stop
        self._hides_reasoning = request.hides_reasoning
        self._open = _NOTHING
        self._blocks = 0  # opened so far; the open one has the index before
        self._calls: dict[int, int] = {}  # tool call -> its block
        self._arguments: list[str] = []  # of the open one
        self._space: list[str] = []  # white space that text began with: shown once there is more

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        message = _message(self._header) | {"usage": _usage(prompt_tokens, cached_tokens, 1)}
        return (
            b"event: message_start\ndata: " + to_json({"type": "message_start", "message": message}) + b"\n\n" + _PING
        )

    def closes(self, index: int, piece: Piece) -> bool:
        at = self._open
        if piece.reasoning and not self._hides_reasoning:
            if at not in (_NOTHING, _THINKING):
                return True
            at = _THINKING
        if piece.content and at != _TEXT and not piece.content.isspace():
            if at != _NOTHING:
                return True
            at = _TEXT
        for call in piece.tool_calls:
            if call.index not in self._calls and at != call.index:
                if at != _NOTHING:
                    return True
                at = call.index
        return False

    def piece(self, index: int, piece: Piece) -> bytes:
        if piece.content and self._open == _TEXT and not (piece.reasoning or piece.tool_calls):
            return self._delta(b'{"type":"text_delta","text":' + to_json(piece.content))
        out = b""
        # The end of a call may come with what follows it, which closes its block.
        for call in piece.tool_calls:
            if call.index == self._open:
                out += self._call(call)
        going_on = self._open
        if piece.reasoning and not self._hides_reasoning:
            out += self._reasoning(piece.reasoning)
        if piece.content:
            out += self._text(piece.content)
        for call in piece.tool_calls:
            if call.index != going_on:
                out += self._call(call)
        return out

    def finish(self, choice: Choice) -> bytes:
        usage = _usage(choice.prompt_tokens, choice.cached_tokens, choice.completion_tokens)
        delta = {"type": "message_delta", "delta": _ended(choice, self._stops), "usage": usage}
        return self._close() + b"event: message_delta\ndata: " + to_json(delta) + b"\n\n"

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    # -- blocks

    def _reasoning(self, text: str) -> bytes:
        start = self._start(_THINKING, b'{"type":"thinking","thinking":"","signature":""}')
        return start + self._delta(b'{"type":"thinking_delta","thinking":' + to_json(text))

    def _text(self, text: str) -> bytes:
        if self._open != _TEXT:
            self._space.append(text)
            if text.isspace():
                return b""
            text, self._space = "".join(self._space), []
        start = self._start(_TEXT, b'{"type":"text","text":""}')
        return start + self._delta(b'{"type":"text_delta","text":' + to_json(text))

    def _call(self, call: ToolCallPiece) -> bytes:
        start = b""
        block = self._calls.get(call.index)
        if block is None:
            self._space = []
            shown = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            start = self._start(call.index, to_json(shown))
            block = self._calls[call.index] = self._blocks - 1
        if not call.arguments:
            return start
        if call.index != self._open:  # its block is closed: nothing can be added to an object
            return b""
        self._arguments.append(call.arguments)
        return start + _DELTA % (block, _HELD)

    def _delta(self, delta: bytes) -> bytes:
        return _DELTA % (self._blocks - 1, delta)

    def _start(self, kind: int, block: bytes) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._blocks += 1
        return closed + _START % (self._blocks - 1, block)

    def _close(self) -> bytes:
        if self._open == _NOTHING:
            return b""
        last = b""
        if self._open == _THINKING:
            seal = to_json(signature(self._header.answer_id))
            last = self._delta(b'{"type":"signature_delta","signature":' + seal)
        elif self._arguments:
            whole = to_json(to_json(_input("".join(self._arguments))).decode())
            last = self._delta(b'{"type":"input_json_delta","partial_json":' + whole)
            self._arguments = []
        self._open = _NOTHING
        return last + _STOP % (self._blocks - 1)
