"""Continues a completion that another worker began (I9): reads the tokens sampled so far again without sending them.

Owns the sampling law of the rest, and removes the text that the client already has. The parser here may show text a little
earlier or later than the lost worker's did (vLLM's depend on the steps), but in the end both show the same text. So as many
characters as the client has are cut off the start of the parser's output, during the replay and after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from steno.contracts.chat import Sampling, ToolCallPiece
from steno.contracts.wire.frames import Shown
from steno_worker.chat.interfaces import ParsedText
from steno_worker.chat.reader import CompletionReader, StepText, merge
from steno_worker.interfaces import TokenStep


def law_of_the_rest(law: Sampling, sampled: int, attempt: int) -> Sampling:
    """The law for what follows `sampled` tokens. Its max_tokens may be 0.

    The seed is another one, derived: the same seed would draw the same tokens once more.
    """
    seed = law.seed
    if seed is not None:
        seed = int.from_bytes(hashlib.blake2b(f"{seed} {attempt}".encode(), digest_size=8).digest(), "big", signed=True)
    return msgspec.structs.replace(
        law,
        max_tokens=None if law.max_tokens is None else max(0, law.max_tokens - sampled),
        min_tokens=max(0, law.min_tokens - sampled),
        seed=seed,
    )


def replay(reader: CompletionReader, ids: Sequence[int], law: Sampling, stops: frozenset[int]) -> StepText:
    """Feed the sampled ids to the reader, one token at a time. Returns: all their text in `parsed`. `reason` is set if the
    completion ended with these ids: the Finish was lost with its worker.

    Args: law: of the whole completion. stops: ids at which the engine stops.
    """
    whole = StepText([], ParsedText())
    for index, token_id in enumerate(ids):
        step = TokenStep([token_id], None, "")
        if index + 1 == len(ids):
            if token_id in stops and len(ids) > law.min_tokens:
                step.finish = "stop"
            elif law.max_tokens is not None and len(ids) >= law.max_tokens:
                step.finish = "length"
        read = reader.read(step)
        merge(whole.parsed, read.parsed)
        whole.reason, whole.stop = read.reason, read.stop
    return whole


class UnshownPart:
    """Takes what a client has off what a parser shows, until all of it has been taken off."""

    def __init__(self, shown: Shown) -> None:
        self._reasoning = shown.reasoning
        self._content = shown.content
        self._calls = list(shown.calls)
        self._known = len(shown.calls)
        self.over = not (self._reasoning or self._content or self._known)

    def of(self, parsed: ParsedText) -> ParsedText:
        """What of this is new."""
        reasoning, self._reasoning = _after(parsed.reasoning, self._reasoning)
        content, self._content = _after(parsed.content, self._content)
        calls = [new for piece in parsed.tool_calls if (new := self._piece(piece)) is not None]
        return ParsedText(content, reasoning, calls)

    def _piece(self, piece: ToolCallPiece) -> ToolCallPiece | None:
        if piece.index >= self._known:
            return piece
        arguments, self._calls[piece.index] = _after(piece.arguments, self._calls[piece.index])
        return ToolCallPiece(piece.index, arguments) if arguments else None


def _after(text: str, shown: int) -> tuple[str, int]:
    return text[shown:], max(0, shown - len(text))
