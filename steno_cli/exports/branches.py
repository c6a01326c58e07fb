"""A session's branches: the paths from a root to a leaf that are exported, and which path each turn belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steno.contracts.records import Turn


@dataclass(frozen=True)
class Branch:
    """One path from a root to a leaf.

    turns: in order, root first. shared: how many of the first turns stand in an earlier branch too.
    """

    turns: list[Turn]
    shared: int

    @property
    def root(self) -> Turn:
        return self.turns[0]

    @property
    def leaf(self) -> Turn:
        return self.turns[-1]


def branches_of(turns: Sequence[Turn]) -> list[Branch]:
    """All branches, in commit order of their leaves. As in samples, a turn that said nothing and a superseded one are no leaf.

    Args: turns: all turns of one session.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    inner: set[str] = set()
    leaves: list[Turn] = []
    for turn in sorted(turns, key=lambda turn: turn.index, reverse=True):  # children come after their parents
        if turn.turn_id not in inner:
            if not has_reply(turn) or turn.superseded_by is not None:
                continue
            leaves.append(turn)
        if turn.parent_id is not None:
            inner.add(turn.parent_id)
    seen: set[str] = set()
    found = []
    for leaf in reversed(leaves):
        path = [leaf]
        while path[-1].parent_id is not None:
            path.append(by_id[path[-1].parent_id])
        path.reverse()
        found.append(Branch(path, sum(turn.turn_id in seen for turn in path)))
        seen.update(turn.turn_id for turn in path)
    return found


def has_reply(turn: Turn) -> bool:
    reply = turn.reply
    return bool(
        turn.completion_ids
        or turn.upstream_tokens
        or reply.get("content")
        or reply.get("reasoning_content")
        or reply.get("tool_calls")
    )


def delegations(turns: Sequence[Turn], branches: Sequence[Branch]) -> dict[str, str]:
    """Root of a conversation -> the turn during whose tool calls it took place.

    Recorded turns do not say who started a conversation. It is taken for a sub-agent's if all of it was committed between a turn
    that called tools and that turn's continuation; of several such turns, the newest counts.
    """
    root_of: dict[str, str] = {}
    spans: dict[str, tuple[int, int]] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        root = root_of[turn.turn_id] = root_of[turn.parent_id] if turn.parent_id is not None else turn.turn_id
        first, _ = spans.get(root, (turn.index, 0))
        spans[root] = (first, turn.index)
    waits = [
        (caller, after)
        for branch in branches
        for caller, after in zip(branch.turns, branch.turns[1:], strict=False)
        if caller.reply.get("tool_calls")
    ]
    found = {}
    for root, (first, last) in spans.items():
        callers = [
            caller
            for caller, after in waits
            if caller.index < first and last < after.index and root_of[caller.turn_id] != root
        ]
        if callers:
            found[root] = max(callers, key=lambda turn: turn.index).turn_id
    return found
