"""OpenAI Chat Completions: `POST /{trial_id}/v1/chat/completions`, streamed and not. Requests are `chat_request.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from proxy.contracts.canonical import CanonicalRequest, Message, TokenLogprob, ToolCallPiece
from proxy.contracts.errors import StenoError
from proxy.dialects import openai
from proxy.dialects.base import Choice, Header, Piece, Writer, decode
from proxy.dialects.chat_request import Body, canonical
from proxy.dialects.openai import logprobs_of, to_json
from proxy.dialects.openai_schema import CHAT

_decoder = msgspec.json.Decoder(Body)
_NO_LOGPROBS = b',"logprobs":null'


class Chat:
    """The dialect. Stateless."""

    name: ClassVar[str] = "chat"
    paths: ClassVar[tuple[str, ...]] = ("/v1/chat/completions",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = openai.KEEPALIVE

    def parse(self, body: bytes) -> CanonicalRequest:
        return canonical(decode(_decoder, body))

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return ChatWriter(request, header)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        wants_logprobs = request.job.top_logprobs is not None
        return to_json(
            {
                **openai.envelope(header, "chatcmpl", "chat.completion"),
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message_out(choice.message),
                        "logprobs": {"content": logprobs_of(choice.tokens), "refusal": None}
                        if wants_logprobs
                        else None,
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": openai.usage(choices),
                "service_tier": None,
            }
        )

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return openai.error_body(error)

    def broken(self, error: StenoError) -> bytes:
        """Nothing: chat clients retry a broken connection, and several treat an error event as the end of their work."""
        return b""

    def openapi(self) -> dict[str, Any]:
        return CHAT


def _message_out(message: Message) -> dict[str, Any]:
    """As OpenAI shows it: content is null beside tool calls, `refusal` is always there."""
    calls = message.get("tool_calls")
    out = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    return out


class ChatWriter:
    """`chat.completion.chunk` events. What is the same in every chunk of a stream is encoded once; a piece is spliced
    between (this is the hot path: about 1 us a chunk against 15 us for encoding a whole chunk anew)."""

    def __init__(self, request: CanonicalRequest, header: Header) -> None:
        self._wants_logprobs = request.job.top_logprobs is not None
        self._include_usage = request.include_usage
        self._constant = b"data: " + to_json(openai.envelope(header, "chatcmpl", "chat.completion.chunk"))[:-1]
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
        head, tail = self._heads[index], self._tail
        logprobs = _logprobs_json(piece.tokens) if self._wants_logprobs and piece.tokens else _NO_LOGPROBS
        if piece.content and not (piece.reasoning or piece.tool_calls):
            return head + b'{"content":' + to_json(piece.content) + b"}" + logprobs + tail
        first, *others = _deltas(piece) or [{}]
        if not first and logprobs is _NO_LOGPROBS:
            return b""
        events = [head + to_json(first) + logprobs + tail]
        events += [head + to_json(delta) + _NO_LOGPROBS + tail for delta in others]
        return b"".join(events)

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


def _deltas(piece: Piece) -> list[dict[str, Any]]:
    """One for each thing that is said, as OpenAI does: where a text and a call are in one chunk, AutoGen drops the call."""
    deltas: list[dict[str, Any]] = []
    if piece.reasoning:
        deltas.append({"reasoning_content": piece.reasoning})
    if piece.content:
        deltas.append({"content": piece.content})
    deltas += [{"tool_calls": [_call_piece(call)]} for call in _joined(piece.tool_calls)]
    return deltas


def _joined(calls: list[ToolCallPiece]) -> list[ToolCallPiece]:
    """One fragment per call: OpenAI's SDK takes two of one call in its first chunk for two calls."""
    if len(calls) < 2:
        return calls
    joined: dict[int, ToolCallPiece] = {}
    for call in calls:
        known = joined.get(call.index)
        joined[call.index] = (
            call
            if known is None
            else ToolCallPiece(
                call.index, known.arguments + call.arguments, known.id or call.id, known.name or call.name
            )
        )
    return list(joined.values())


def _call_piece(call: ToolCallPiece) -> dict[str, Any]:
    """The first fragment of a call carries its id, type and name; later ones only arguments."""
    if call.id or call.name:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> bytes:
    return b',"logprobs":' + to_json({"content": logprobs_of(tokens), "refusal": None})
