"""Chunks of an upstream's stream, in OpenAI's shapes as LiteLLM gives them -> deltas without ids, and the end.

Pure: takes any object with the attributes of LiteLLM's `ModelResponseStream`. What an upstream says of its usage comes last or in
between, and is kept for the Finish.
"""

from __future__ import annotations

from typing import Any

from steno.contracts.chat import FinishReason, TokenLogprob, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.json_limits import whole_text
from steno.contracts.wire.frames import Delta, Finish


class ChunkReader:
    """One completion. wants_logprobs: the client asked for them; text-only records have none."""

    def __init__(self, stream: int, *, wants_logprobs: bool) -> None:
        self._stream = stream
        self._wants_logprobs = wants_logprobs
        self._calls: list[tuple[int, str]] = []  # the upstream's index and id of each call, in our order
        self._reason: str | None = None
        self._usage: Any = None

    def read(self, chunk: Any) -> Delta | None:
        """What a chunk adds; None when that is nothing. Raises: EngineFailed: something else where text belongs."""
        if getattr(chunk, "usage", None) is not None:
            self._usage = chunk.usage
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        if choice.finish_reason:
            self._reason = choice.finish_reason
        said = Delta(self._stream, b"", b"", "")
        delta = getattr(choice, "delta", None)
        if delta is None:  # a plain completion
            said.content = _text(choice.text)
        else:
            said.content = _text(getattr(delta, "content", None))
            said.reasoning = _text(getattr(delta, "reasoning_content", None))
            said.tool_calls = [self._call(piece) for piece in getattr(delta, "tool_calls", None) or ()]
            if self._wants_logprobs:
                said.tokens = _logprobs(getattr(choice, "logprobs", None))
        return said if said.content or said.reasoning or said.tool_calls or said.tokens else None

    def finish(self) -> Finish:
        """The end. Raises: EngineFailed: the stream ended without saying how."""
        usage = self._usage
        prompt = getattr(usage, "prompt_tokens_details", None)
        completion = getattr(usage, "completion_tokens_details", None)
        return Finish(
            self._stream,
            self._finish_reason(),
            completion_tokens=_count(usage, "completion_tokens"),
            cached_tokens=_count(prompt, "cached_tokens"),
            prompt_tokens=_count(usage, "prompt_tokens"),
            reasoning_tokens=_count(completion, "reasoning_tokens"),
        )

    def _finish_reason(self) -> FinishReason:
        if self._reason is None:
            raise EngineFailed("the upstream's stream ended without a finish reason")
        if self._reason == "length":
            return "length"
        # Some providers say "stop" after calls, and words of their own (content_filter) for other ends.
        return "tool_calls" if self._calls else "stop"

    def _call(self, piece: Any) -> ToolCallPiece:
        """Calls are numbered by us: some providers give every call index 0, told apart by their ids only."""
        index, call_id = piece.index or 0, _text(piece.id)
        function = piece.function
        name, arguments = (_text(function.name), _text(function.arguments)) if function is not None else ("", "")
        for number in range(len(self._calls) - 1, -1, -1):
            known_index, known_id = self._calls[number]
            if known_index == index and call_id in ("", known_id):
                return ToolCallPiece(number, arguments)
        self._calls.append((index, call_id))
        return ToolCallPiece(len(self._calls) - 1, arguments, call_id, name)


def _text(said: Any) -> str:
    """Two chunks may each have half of a pair: then both halves are U+FFFD."""
    if not isinstance(said, str | None):
        raise EngineFailed(f"the upstream gave {type(said).__name__}, expected text")
    return whole_text(said or "")


def _count(usage: Any, name: str) -> int:
    value = getattr(usage, name, None)
    return value if isinstance(value, int) and value > 0 else 0


def _logprobs(given: Any) -> list[TokenLogprob]:
    tokens = []
    for token in getattr(given, "content", None) or ():
        others = [(_text(other.token), _raw(other), other.logprob) for other in token.top_logprobs or ()]
        tokens.append(TokenLogprob(_text(token.token), _raw(token), token.logprob, others))
    return tokens


def _raw(token: Any) -> bytes:
    return bytes(token.bytes) if token.bytes is not None else _text(token.token).encode()
