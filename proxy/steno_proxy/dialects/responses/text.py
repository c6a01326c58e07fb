"""Custom (free text) tools: a model calls them as functions of one text, and their client is given the text, as it is sampled."""

from __future__ import annotations

import json
import re

from steno.contracts.json_limits import whole_text

FREE_TEXT = "input"
"""The argument of a custom tool's function."""
_OPENING = f'{{"{FREE_TEXT}":"'
_OPENS = re.compile(rf'\s*\{{\s*"{FREE_TEXT}"\s*:\s*"')
_CLOSED = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_UNFINISHED = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?\\(?:u[0-9a-fA-F]{0,3})?$|\\u[dD][89abAB][0-9a-fA-F]{2}$")


_LOOKED_AT = 64
"""Characters at the beginning of arguments that say whether they are of the agreed shape."""


class FreeText:
    """Reads the text out of `{"input": "…"}` while the arguments are still being sampled.

    Arguments of another shape are their own text (`raw`), since a client must see whatever the model said.
    """

    __slots__ = ("_held", "_open", "_texts", "raw")

    def __init__(self) -> None:
        self.raw: bool | None = None  # None: can't be told yet
        self._texts: list[str] = []
        self._held = ""
        self._open = True

    @property
    def text(self) -> str:
        """What has been said so far."""
        return "".join(self._texts)

    def feed(self, arguments: str) -> str:
        """The next piece of the arguments; returns what of the text can be said now."""
        self._held += arguments
        if self.raw is None:
            bare = re.sub(r"\s", "", self._held[:_LOOKED_AT])
            if bare.startswith(_OPENING):
                found = _OPENS.match(self._held)
                self.raw = found is None
                self._held = self._held[found.end() :] if found else self._held
            elif not _OPENING.startswith(bare) or len(self._held) >= _LOOKED_AT:
                self.raw = True
        return self._said()

    def end(self) -> str:
        """No more arguments; returns what was held back."""
        if self.raw is None:
            self.raw = True
        said = self._said()
        if not self.raw and self._open:
            self._held = ""  # half an escape
        return said

    def _said(self) -> str:
        if self.raw is None or not self._open:
            return ""
        if self.raw:
            said, self._held = self._held, ""
        else:
            closed = _CLOSED.match(self._held)
            if closed:
                said, self._open = _unescaped(closed[1]), False
            else:
                # An escape cut in two waits for its other half; so does half a surrogate pair.
                unfinished = _trailing(self._held)
                said = _unescaped(self._held[: len(self._held) - unfinished])
                self._held = self._held[len(self._held) - unfinished :] if unfinished else ""
        self._texts.append(said)
        return said


def _trailing(text: str) -> int:
    """How many characters at the end are an escape that is not whole."""
    backslashes = len(text) - len(text.rstrip("\\"))
    if backslashes % 2 == 0 and backslashes:
        return 0
    found = _UNFINISHED.search(text)
    if found is None:
        return 0
    before = text[: found.start()]
    if (len(before) - len(before.rstrip("\\"))) % 2:  # the backslash found is itself escaped
        return 0
    return len(text) - found.start()


def _unescaped(text: str) -> str:
    """Half a surrogate pair can be sampled as an escape, and told to no client: it is U+FFFD."""
    try:
        return whole_text(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that is none: the model's own words
        return text


def free_text(arguments: str) -> tuple[str, bool]:
    """Text and `raw` of whole arguments."""
    reader = FreeText()
    reader.feed(arguments)
    reader.end()
    return reader.text, bool(reader.raw)
