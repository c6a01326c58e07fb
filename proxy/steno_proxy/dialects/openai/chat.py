"""OpenAI Chat Completions: `POST /{trial_id}/v1/chat/completions`, streamed and not. Requests are `chat_request.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from steno.contracts.chat import CanonicalRequest, Message, TokenLogprob, ToolCallPiece
from steno.contracts.errors import StenoError
from steno_proxy.dialects.base import Choice, Header, Piece, Writer, decode
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.chat_request import ChatBody, canonical
from steno_proxy.dialects.openai.common import logprobs_of, to_json
from steno_proxy.dialects.openai.schema import CHAT

_decoder = msgspec.json.Decoder(ChatBody)
_NO_LOGPROBS = b',"logprobs":null'


Reasoning = Literal["reasoning_content", "reasoning", "both"]
"""Which fields of a reply hold its reasoning: DeepSeek's name, vLLM's since 0.12, or one beside the other."""


class ChatDialect:
    """The dialect. Stateless."""

    name: ClassVar[str] = "chat"
    paths: ClassVar[tuple[str, ...]] = ("/v1/chat/completions",)
    call_prefix: ClassVar[str] = "call"
    keepalive: ClassVar[bytes] = common.KEEPALIVE

    def __init__(self, reasoning: Reasoning = "both") -> None:
        self._reasoning = ("reasoning_content", "reasoning") if reasoning == "both" else (reasoning,)

    def parse(self, body: bytes) -> CanonicalRequest:
        return canonical(decode(_decoder, body))

    def writer(self, request: CanonicalRequest, header: Header) -> Writer:
        return ChatWriter(request, header, self._reasoning)

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        hides = request.hides_reasoning
        reasoning_in = () if hides else self._reasoning
        wants_logprobs = request.job.top_logprobs is not None and not hides
        return to_json(
            {
                **common.envelope(header, "chatcmpl", "chat.completion"),
                **common.prompt_ids(request, choices),
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message_out(choice.message, reasoning_in),
                        "logprobs": {"content": logprobs_of(choice.tokens), "refusal": None}
                        if wants_logprobs
                        else None,
                        "finish_reason": choice.finish_reason,
                        **common.token_ids(request, choice),
                    }
                    for choice in choices
                ],
                "usage": common.usage(choices),
                "service_tier": None,
            }
        )

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def broken(self, error: StenoError) -> bytes:
        """Nothing: chat clients retry a broken connection, and several treat an error event as the end of their work."""
        return b""

    def openapi(self) -> dict[str, Any]:
        return CHAT


def _message_out(message: Message, reasoning_in: Sequence[str]) -> dict[str, Any]:
    """As OpenAI shows it: content is null beside tool calls, `refusal` is always there. reasoning_in: the fields that hold the
    reasoning. They are null where there is none, as vLLM has them: without them LiteLLM looks for tags in the text."""
    calls = message.get("tool_calls")
    out = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    out |= dict.fromkeys(reasoning_in, message.get("reasoning_content") or None)
    if calls:
        out["tool_calls"] = calls
    return out


class ChatWriter:
    """`chat.completion.chunk` events. What is the same in every chunk of a stream is encoded once; a piece is spliced
    between (this is the hot path: about 1 us a chunk against 15 us for encoding a whole chunk anew)."""

    def __init__(
        self, request: CanonicalRequest, header: Header, reasoning_in: Sequence[str] = ("reasoning_content",)
    ) -> None:
        """reasoning_in: the fields that hold the reasoning, where it is shown."""
        self._reasoning_in = () if request.hides_reasoning else reasoning_in
        self._wants_logprobs = request.job.top_logprobs is not None and not request.hides_reasoning
        self._include_usage = request.include_usage
        self._constant = b"data: " + to_json(common.envelope(header, "chatcmpl", "chat.completion.chunk"))[:-1]
        self._heads = [
            self._constant + b',"choices":[{"index":%d,"delta":' % index for index in range(max(request.n, 1))
        ]
        self._shown = common.StreamExtras(request, len(self._heads))

    def prompt(self, ids: bytes) -> None:
        self._shown.prompt(ids)

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        shown = self._shown
        shown.begins(prompt_tokens)
        head = self._heads[index] + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return head + shown.prompt_member() + shown.usage(index) + b"}\n\n"

    def piece(self, index: int, piece: Piece) -> bytes:
        head, tail, shown = self._heads[index], self._shown.tail, self._shown
        first_tail = tail
        if not shown.is_plain:
            shown.count(index, piece.ids)
            first_tail, tail = shown.tail_of(index, piece.ids), shown.tail_of(index, b"")
        logprobs = _logprobs_json(piece.tokens) if self._wants_logprobs and piece.tokens else _NO_LOGPROBS
        if piece.content and not (piece.reasoning or piece.tool_calls):
            return head + b'{"content":' + to_json(piece.content) + b"}" + logprobs + first_tail
        first, *others = _deltas(piece, self._reasoning_in) or [{}]
        if not first and logprobs is _NO_LOGPROBS and not (shown.ids and piece.ids):
            return b""
        events = [head + to_json(first) + logprobs + first_tail]
        events += [head + to_json(delta) + _NO_LOGPROBS + tail for delta in others]
        return b"".join(events)

    def finish(self, choice: Choice) -> bytes:
        reason = to_json(choice.finish_reason)
        return (
            self._heads[choice.index] + b'{},"logprobs":null,"finish_reason":' + reason + self._shown.ids_member(b"")
            + b"}]" + self._shown.usage(choice.index, choice.completion_tokens) + b"}\n\n"
        )  # fmt: skip

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._include_usage:
            return common.DONE
        usage = to_json(common.usage(choices))
        return self._constant + b',"choices":[],"usage":' + usage + b"}\n\n" + common.DONE


def _deltas(piece: Piece, reasoning_in: Sequence[str]) -> list[dict[str, Any]]:
    """One for each thing that is said, as OpenAI does: where a text and a call are in one chunk, AutoGen drops the call."""
    deltas: list[dict[str, Any]] = []
    if piece.reasoning and reasoning_in:
        deltas.append(dict.fromkeys(reasoning_in, piece.reasoning))
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
