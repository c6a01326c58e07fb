"""Texts that need not be sent to Redis again: a guess that saves bytes, never one that the record depends on.

Settings and tools are the same from turn to turn, and tools can be tens of kilobytes. A text left out on a wrong guess (the
trial was deleted and made anew, say) is asked for by commit.lua, and the commit is sent again whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from proxy.store.codec import EncodedTurn
from proxy.store.text import pack

MAX_KNOWN = 16_384  # about 2 MB


class KnownTexts:
    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], None] = {}

    def packed(self, trial_id: str, encoded: EncodedTurn) -> Iterator[bytes]:
        """What to send for each text: b"" for one that is believed to be there."""
        shared = encoded.shared_texts
        for i, text in enumerate(encoded.texts):
            yield b"" if i < shared and (trial_id, text.digest) in self._known else pack(text.raw)

    def add(self, trial_id: str, encoded: EncodedTurn) -> None:
        """After a commit. The oldest are forgotten first."""
        for text in encoded.texts[: encoded.shared_texts]:
            self._known[trial_id, text.digest] = None
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
