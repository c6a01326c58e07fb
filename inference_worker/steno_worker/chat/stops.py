"""Stop strings: text that may begin one is held back; at a match the text ends before it, or after it where it is to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What a `StopMatcher` found. `text` may be shown. `stop`: the string that matched, or None: go on."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the earliest stop string in a text that comes in pieces; of two that begin at the same place, the first listed.

    Which one matches depends on the text alone, never on how it was cut: a match is looked for after each piece, so callers
    feed one token at a time, which also tells them the token that completed it.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """shown: the text ends after the match, and not before it."""
        self._stops = [stop for stop in stops if stop]
        self._shown = shown
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        if not text:
            return StopMatch("", None)
        text = self._held + text
        # The match that is complete first, as if characters came one by one, then the longest reach back.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found, key=lambda match: match[:2])
            self._held = ""
            return StopMatch(text[: start + len(stop) if self._shown else start], stop)
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], None)

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop.startswith(text[len(text) - length :]):
                    longest = length
                    break
        return longest
