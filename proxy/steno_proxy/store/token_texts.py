"""Texts of tokens, one piece for each tokenizer (`workers/token_texts.py` makes them): what is asked of a store, and the store in
memory. At most MOST_TOKENIZERS pieces and MOST_BYTES are kept: the pieces that no worker has had for longest go first.
"""

from __future__ import annotations

from typing import Protocol

MOST_TOKENIZERS = 64
MOST_BYTES = 64 << 20
"""Of all pieces together, as they are kept: about 1 MB for each tokenizer of today."""


class TokenTextsStore(Protocol):
    """Pieces by the key of their tokenizer (`Turn.tokenizer`). What came first stays."""

    async def keys(self) -> list[str]:
        """The keys of the tokenizers whose pieces are kept, sorted."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def keep(self, key: str, piece: bytes) -> None:
        """Keep a piece, unless there is one. If there are too many pieces, those that no worker has had for longest are
        dropped. A piece above MOST_BYTES is not kept."""
        ...

    async def touch(self, key: str) -> bool:
        """Note that a worker has this tokenizer now. Returns whether its piece is kept."""
        ...


class MemoryTokenTexts:
    """Keeps the `TokenTextsStore` protocol, in this process only."""

    def __init__(self) -> None:
        self._pieces: dict[str, bytes] = {}  # the one that was touched last is the last

    async def keys(self) -> list[str]:
        return sorted(self._pieces)

    async def get(self, key: str) -> bytes | None:
        return self._pieces.get(key)

    async def keep(self, key: str, piece: bytes) -> None:
        if len(piece) > MOST_BYTES:
            return
        self._pieces[key] = self._pieces.pop(key, piece)
        while len(self._pieces) > MOST_TOKENIZERS or sum(map(len, self._pieces.values())) > MOST_BYTES:
            del self._pieces[next(iter(self._pieces))]

    async def touch(self, key: str) -> bool:
        if key in self._pieces:
            self._pieces[key] = self._pieces.pop(key)
        return key in self._pieces
