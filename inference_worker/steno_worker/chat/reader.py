"""Turns sampled ids into text, up to a stop string, and parses it.

A text that reaches a stop string ends there; the ids up to and including the token that completed it are on record, later ones
of the same step are not, and nobody was given them. `parallel_tool_calls: false` without a grammar stops the same way, after the
token that closes the first call, with `Finish.stop` = "parallel_tool_calls". vLLM's parsers do not say when a call is closed:
there the turn ends at the token that opens a second call, of which nothing is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steno.contracts.chat import FinishReason, Sampling
from steno_worker.chat.interfaces import ChatFormat, ParsedText, Parser
from steno_worker.chat.stops import StopMatcher
from steno_worker.interfaces import TokenStep

ONE_CALL = "parallel_tool_calls"
"""`Finish.stop` of a turn that was ended after its first call."""


class StepText(msgspec.Struct):
    """The text that one step of a completion gave. reason: the completion ends here."""

    ids: list[int]
    parsed: ParsedText
    reason: FinishReason | None = None
    stop: str = ""

    def is_empty(self) -> bool:
        return not (self.parsed.content or self.parsed.reasoning or self.parsed.tool_calls)


class CompletionReader:
    """Steps of one completion -> text -> stop strings -> parser."""

    def __init__(
        self, format: ChatFormat, parser: Parser, law: Sampling, one_call: bool, *, shows_stop: bool = False
    ) -> None:
        self.sampled = 0
        self.cached_tokens = 0
        self.timings: dict[str, float] = {}
        self._decoder = format.decoder()
        self._parser = parser
        self._matcher = StopMatcher(law.stop, shown=shows_stop) if law.stop else None
        self._min_tokens = law.min_tokens
        self._stop_token_ids = frozenset(law.stop_token_ids) - format.stop_ids
        self._one_call = one_call and hasattr(parser, "closed_calls")
        self._called = False

    def read(self, step: TokenStep) -> StepText:
        self.cached_tokens = max(self.cached_tokens, step.cached_tokens)
        self.timings.update(step.timings)
        by_token = self._matcher is not None or self._one_call
        read = self._by_token(step) if by_token else self._at_once(step)
        self.sampled += len(read.ids)
        self._called = self._called or bool(read.parsed.tool_calls)
        if read.reason == "stop" and self._called:
            read.reason = "tool_calls"
        return read

    def _at_once(self, step: TokenStep) -> StepText:
        final = step.finish is not None
        ids, stop = step.ids, ""
        if final and ids and ids[-1] in self._stop_token_ids:
            ids, stop = ids[:-1], str(ids[-1])  # a stop id of the request's own shows no text either
        text = self._decoder.feed(ids, final=final)
        parsed = self._parser.feed(text, step.ids, final=final) if text or final or ids else ParsedText()
        return StepText(step.ids, parsed, step.finish, stop)

    def _by_token(self, step: TokenStep) -> StepText:
        """One token after the other: a stop string or a call may be complete in the middle of a step."""
        whole, count = ParsedText(), len(step.ids)
        for index, token_id in enumerate(step.ids):
            final = step.finish is not None and index == count - 1
            hidden = final and token_id in self._stop_token_ids
            text = self._decoder.feed([] if hidden else [token_id], final=final)
            stop = None
            if self._matcher is not None and self.sampled + index + 1 > self._min_tokens:
                text, stop = self._matcher.feed(text)
                if final and stop is None:
                    text += self._matcher.flush()
            ends = final or stop is not None
            merge(whole, self._parser.feed(text, [token_id], final=ends))
            if stop is not None:
                return StepText(step.ids[: index + 1], whole, "stop", stop)
            if final:
                return StepText(step.ids, whole, step.finish, str(token_id) if hidden else "")
            if self._one_call and self._parser.closed_calls:  # type: ignore[attr-defined]
                merge(whole, self._parser.feed(self._matcher.flush() if self._matcher else "", [], final=True))
                return StepText(step.ids[: index + 1], whole, "stop", ONE_CALL)
        if step.finish is not None:  # an engine may report its end in a step without ids
            text = self._decoder.feed([], final=True)
            if self._matcher is not None:
                text, stop = self._matcher.feed(text)
                if stop is None:
                    text += self._matcher.flush()
            merge(whole, self._parser.feed(text, [], final=True))
        return StepText(step.ids, whole, step.finish)


class PlainText:
    """All text is content: `completions`."""

    def feed(self, text: str, ids: Sequence[int], *, final: bool = False) -> ParsedText:
        return ParsedText(content=text)


def merge(whole: ParsedText, part: ParsedText) -> None:
    """Add what came later; pieces of one call become one."""
    whole.content += part.content
    whole.reasoning += part.reasoning
    for piece in part.tool_calls:
        last = whole.tool_calls[-1] if whole.tool_calls else None
        if last is not None and last.index == piece.index and not piece.id and not piece.name:
            last.arguments += piece.arguments
        else:
            whole.tool_calls.append(piece)
