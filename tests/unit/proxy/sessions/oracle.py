"""Recognition by exhaustive search over whole conversations: slow, short, and written without a trie.

It follows the table in `steno_proxy/sessions/fork.py` row by row. Used to check `Tree`; nothing of `Tree` is used here.
"""

from __future__ import annotations

from dataclasses import dataclass

from steno.contracts.records import ForkReason, IndexRow
from steno_proxy.sessions.messages.call_ids import parse_call_id


@dataclass
class Told:
    """One recorded turn with the whole conversation it ended."""

    number: int
    turn_id: str
    parent: int
    conversation: list[bytes]
    opening: bytes | None
    tools: bytes
    options: bytes
    partial: bool
    barren: bool
    anchor: int

    @property
    def asked(self) -> list[bytes]:
        return self.conversation[:-1]

    def under(self, tools: bytes, options: bytes) -> bool:
        return (self.tools, self.options) == (tools, options)


class Oracle:
    def __init__(self) -> None:
        self.turns: list[Told] = []

    def add(self, row: IndexRow) -> None:
        digests = [row.digests[i : i + 16] for i in range(0, len(row.digests), 16)]
        number = len(self.turns)
        parent = self.turns[row.parent] if row.parent >= 0 else None
        opening = parent.opening if parent else next((d for d in digests[:-1] if d[:1] != b"s"), None)
        self.turns.append(
            Told(
                number=number,
                turn_id=row.turn_id,
                parent=row.parent,
                conversation=(parent.conversation if parent else []) + digests,
                opening=opening,
                tools=row.tools,
                options=row.options,
                partial=row.partial,
                barren=row.partial and row.completion_tokens == 0,
                anchor=number if row.own_call_ids else parent.anchor if parent else -1,
            )
        )

    def recognise(self, digests, tools, options, call_ids):
        """(parent, prefix_messages, fork_reason)."""
        if not self.turns:
            return -1, 0, None
        covering = [t for t in self.turns if not t.barren and t.conversation == digests[: len(t.conversation)]]
        longest = max((len(t.conversation) for t in covering), default=0)
        usable = [t for t in covering if t.under(tools, options)]
        covered = max((len(t.conversation) for t in usable), default=0)
        parent = -1
        if usable:
            among = [t for t in usable if len(t.conversation) == covered]
            parent = self._named(among, digests, covered, call_ids)
        asked = [t for t in self.turns if t.asked == digests]
        twins = [t for t in asked if t.under(tools, options)]
        twins = [t for t in twins if t.parent == parent] or [t for t in twins if t.parent == -1]
        reason = self._reason(digests, tools, options, parent, covered, longest, covering, asked, twins)
        return parent, covered, reason

    def _named(self, among, digests, covered, call_ids):
        for ids in reversed(call_ids[:covered]):
            for call_id in ids:
                named = parse_call_id(call_id)
                for turn in self.turns:
                    if named and turn.turn_id == named[0] and turn.conversation == digests[: len(turn.conversation)]:
                        if turn in among:
                            return turn.number
                        below = [t for t in among if t.anchor == turn.number]
                        if below and len(turn.conversation) <= covered:
                            return preferred(below)
        return preferred(among)

    def _reason(self, digests, tools, options, parent, covered, longest, covering, asked, twins):
        def changed(turn):
            return ForkReason.OPTIONS_CHANGED if turn.tools == tools else ForkReason.TOOLS_CHANGED

        if longest > covered:
            return changed([t for t in covering if len(t.conversation) == longest][-1])
        if parent >= 0 and not any(t.parent == parent for t in self.turns):
            return None
        if twins:
            return ForkReason.SIBLING
        if asked and not asked[-1].under(tools, options):
            return changed(asked[-1])
        shared = max(common(t.conversation, digests) for t in self.turns)
        only_system = all(d[:1] == b"s" for d in digests[:shared])
        if shared < len(digests):
            if only_system:
                first = next((d for d in digests[shared:] if d[:1] != b"s"), None)
                if first is not None and any(t.opening == first for t in self.turns):
                    return ForkReason.SYSTEM_CHANGED
            later = self._later(digests, shared)
            if later == shared:
                return ForkReason.HISTORY_DROPPED
            replied = any(not t.barren and t.asked == digests[:shared] for t in self.turns)
            if digests[shared][:1] == b"a" and replied:
                return ForkReason.ASSISTANT_REWRITTEN
            if later is not None:
                return ForkReason.HISTORY_REWRITTEN
        return ForkReason.NEW_CONVERSATION if only_system else ForkReason.DIVERGED

    def _later(self, digests, shared):
        for i in range(shared, len(digests)):
            places = [t for t in self.turns if not t.barren and t.conversation[-1] == digests[i]]
            if digests[i][:1] != b"a" or not places:
                continue
            recorded = places[-1].conversation
            if len(recorded) <= shared or recorded[:shared] != digests[:shared]:
                continue
            agree = common(recorded[shared:][::-1], digests[shared : i + 1][::-1])
            return i + 1 - agree
        return None


def preferred(turns: list[Told]) -> int:
    whole = [t for t in turns if not t.partial]
    return max((t.number for t in whole or turns), default=-1)


def common(a: list[bytes], b: list[bytes]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
