"""Why a request does not simply go on: observations about a history, never guesses about an intent (I2).

The first row that holds is the reason. "On record" is what the session's tree holds; a completion is a reply that was
sampled. The parent is the longest recorded conversation that the request begins with, under its tools and options.

    what is observed                                                                              reason
    1   nothing is on record yet                                                                  (none)
    2   a longer beginning is a recorded conversation, of another tool list, else other options   TOOLS_ / OPTIONS_CHANGED
    3   there is a parent, and no turn has gone on from it                                        (none)
    4   a turn with the same parent was asked exactly this                                        SIBLING
    5   exactly these messages were asked under another tool list, else other options             TOOLS_ / OPTIONS_CHANGED
    6   only system messages are shared at the start, and the first message after the request's
        own system messages opened a recorded conversation under other ones                       SYSTEM_CHANGED
    7   messages are missing where the shared beginning ends; what was recorded after them,
        a completion among it, follows right there                                                HISTORY_DROPPED
    8   an assistant message stands where a completion was recorded                               ASSISTANT_REWRITTEN
    9   other messages stand where the shared beginning ends, and a completion that was recorded
        after it comes later (a message replaced, several by one, or one put between)             HISTORY_REWRITTEN
    10  the shared beginning has more than system messages                                        DIVERGED
    11  otherwise: nothing is shared, or system messages only                                     NEW_CONVERSATION

So a sub-agent or a compaction under the main agent's own system prompt is 11, and a reply that was dropped with nothing after
it is 10. Rows 7 and 9 look a completion up by its newest place on record. RENDER_DIFFERS and RENDER_REFUSED are the worker's.

The tree decides rows 1 to 5 and 10 to 11; this module owns what rows 6 to 9 need, which is one pass over the request (I5).
"""

from __future__ import annotations

from collections.abc import Sequence

from steno.contracts.records import ForkReason
from steno_proxy.sessions.messages.normalise import ASSISTANT, SYSTEM
from steno_proxy.sessions.trie import LEAD, REPLIED, Trie


class ForkHistory:
    """Which messages opened a conversation, and where each completion was recorded last."""

    __slots__ = ("_openings", "_replies", "_trie")

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._openings: set[bytes] = set()
        self._replies: dict[bytes, int] = {}

    def note_message(self, node: int, digest: bytes) -> None:
        """A message was recorded at a node."""
        trie = self._trie
        if trie.flags[trie.above[node]] & LEAD and not trie.flags[node] & LEAD:
            self._openings.add(digest)

    def sampled(self, node: int, digest: bytes) -> None:
        """A completion was recorded at a node."""
        self._replies[digest] = node

    def observe(self, digests: Sequence[bytes], shared: int, node: int) -> ForkReason | None:
        """Rows 6 to 9 for a request of which `shared` messages lead to `node`; None: none of them holds."""
        trie, n = self._trie, len(digests)
        if shared == n:
            return None
        if trie.flags[node] & LEAD:
            first = next((d for d in digests[shared:] if d[0] != SYSTEM), None)
            if first in self._openings:
                return ForkReason.SYSTEM_CHANGED
        found = self._found_later(digests, shared, node)
        if found == shared:
            return ForkReason.HISTORY_DROPPED
        if digests[shared][0] == ASSISTANT and trie.flags[node] & REPLIED:
            return ForkReason.ASSISTANT_REWRITTEN
        return ForkReason.HISTORY_REWRITTEN if found > 0 else None

    def _found_later(self, digests: Sequence[bytes], shared: int, node: int) -> int:
        """Index of the first message from which the request agrees again with what was recorded below `node`, up to and
        including a completion; -1: it never does."""
        trie = self._trie
        for i in range(shared, len(digests)):
            if digests[i][0] != ASSISTANT:
                continue
            place = self._replies.get(digests[i], -1)
            if place < 0 or trie.depth[place] <= shared or trie.ancestor(place, shared) != node:
                continue
            while i > shared:
                before = trie.above[place]
                if before == node or trie.child(trie.above[before], digests[i - 1]) != before:
                    break
                i, place = i - 1, before
            return i
        return -1
