"""LRU cache of each conversation's newest path: its token ids, and the reply that ends it.

Mostly, the next request goes on from a turn a few seconds after its commit, in the same process. Its path then needs no round
trip to the store, which would join it from all turns of the conversation. A cache: bounded in bytes over all
recordings, least recently used dropped first, and never the only place where something is.

A path is held in pieces, one a turn, which the path of the next turn takes over. Whole paths, each a little longer than the one
that it replaces, would fragment the heap: three bytes of holes for each byte that is held.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from steno.contracts.chat import Message
from steno_proxy.store.interface import TokenPath

LEAST_BYTES = 16 * 2**20
"""At four bytes a token, forty conversations of 100,000 tokens. By default (half of `tree_cache_bytes`) it is 320 of them."""
_ENTRY_BYTES, _PIECE_BYTES = 1200, 80
"""What a path and a piece of it weigh in CPython 3.11 beside their ids, measured: without them, a hundred thousand short
conversations would be held for good."""


class PathCache:
    """The tokens of the newest paths, by recording (`created_at` tells a trial from its namesake before it) and id of the turn
    that ends them: a number may be another turn's, once the store has lost some."""

    def __init__(self, max_bytes: int = LEAST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[str, float, str | None], _Held] = OrderedDict()
        self.held_bytes = 0

    def get(self, trial_id: str, created_at: float, turn_id: str) -> TokenPath | None:
        """The path that ends with this turn. It stays: siblings may want it too."""
        key = (trial_id, created_at, turn_id)
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return TokenPath(b"".join(found.pieces), found.reply)

    def reply(self, trial_id: str, created_at: float, turn_id: str) -> Message | None:
        """The reply of the turn that ends a path, if that is here."""
        found = self._held.get((trial_id, created_at, turn_id))
        return found.reply if found is not None else None

    def put(self, trial_id: str, created_at: float, turn_id: str, path: TokenPath, parent_id: str | None) -> None:
        """Keep the path of a turn that is on record, whole. The path of its parent is dropped: it is not the newest any more."""
        before = self._drop((trial_id, created_at, parent_id))
        key = (trial_id, created_at, turn_id)
        self._drop(key)
        size = len(path.ids)
        if size > self._max_bytes // 4:
            return
        pieces = [*before.pieces, path.ids[before.size :]] if before is not None else [path.ids]
        weight = size + _ENTRY_BYTES + _PIECE_BYTES * len(pieces) + text_bytes(path.reply)
        self._held[key] = _Held(pieces, size, weight, path.reply)
        self.held_bytes += weight
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._held)))

    def _drop(self, key: tuple[str, float, str | None]) -> _Held | None:
        found = self._held.pop(key, None)
        if found is not None:
            self.held_bytes -= found.weight
        return found


def text_bytes(reply: Message) -> int:
    """About how many bytes the texts of a reply take."""
    calls = reply.get("tool_calls") or ()
    texts = len(reply.get("content") or "") + len(reply.get("reasoning_content") or "")
    return texts + sum(500 + len(call["function"]["arguments"]) for call in calls)


class _Held(NamedTuple):
    """pieces: of the path's ids, in order. size: of all of them, weight: of the whole entry, in bytes."""

    pieces: list[bytes]
    size: int
    weight: int
    reply: Message
