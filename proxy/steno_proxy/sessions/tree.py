"""The conversation tree of one session, and how a request finds its place in it (I2).

A turn ends at the trie node of its reply and goes on from where its parent ends. The tree is built from index rows in commit
order and from nothing else, so every replica that has read the same rows has the same tree. It knows no token and no text.

`recognise` walks the request's digests down the trie once (I5). Where several turns end at one node, being the same to the
letter (parallel siblings, re-asks), it takes the one that the tool-call ids in the request name, else the
newest that is not partial, else the newest. A turn that called no tool is named by its nearest ancestor that did. Below a
call the messages themselves differ, since tool results carry our ids.

A turn is gone on from only under the same tools and template options, and never if it is partial without a token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from steno.contracts.errors import StenoError
from steno.contracts.records import ForkReason, IndexRow
from steno_proxy.sessions.fork import ForkHistory
from steno_proxy.sessions.messages.call_ids import parse_call_id
from steno_proxy.sessions.messages.normalise import DIGEST_BYTES
from steno_proxy.sessions.trie import ASKED_AGAIN, CROWDED, LEAD, REPLIED, ROOT, Trie

PARTIAL, PARENTED, BARREN = 1, 2, 4
"""Turn flags. PARENTED: a turn has gone on from it. BARREN: partial without a token, so none can."""

_NODE_BYTES, _TURN_BYTES = 170, 300
"""What a node and a turn weigh in CPython 3.11, measured; for bounding caches, not for accounting."""


class Recognition(NamedTuple):
    """What a request goes on from in the conversation tree, or why nothing.

    parent: number of the turn it goes on from; -1: a new root.
    prefix_messages: how many of the request's messages the parent's conversation covers, its reply included.
    fork_reason: what was observed when it is not simply the next turn of its branch (the table in `fork.py`).
    """

    parent: int
    prefix_messages: int
    fork_reason: ForkReason | None


class Tree:
    """The conversation tree of a session. Turns are numbered from 0 in commit order; -1 means none.

    ids, parents, finishes, tokens, tokenizers: by turn number, to be read only: turn id, parent's number, finish reason, tokens
    of the whole path, completion included, and what they are tokens of (`records.tokenizer_key`).
    """

    __slots__ = (
        "_anchors", "_asked_before", "_best", "_context_of", "_contexts", "_ends", "_flags", "_history", "_keys", "_numbers",
        "_own", "_trie", "_twins", "finishes", "ids", "parents", "tokenizers", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._trie = Trie()
        self._history = ForkHistory(self._trie)
        self.ids: list[str] = []
        self._numbers: dict[str, int] = {}
        self.parents = array("i")
        self._ends = array("i")
        self.tokens = array("q")
        self.tokenizers: list[bytes] = []
        self._anchors = array("i")  # nearest turn that called tools: itself or an ancestor
        self._asked_before = array("i")  # the turn that was asked at the same node before it, -1: none
        self._context_of = array("i")
        self._flags = bytearray()
        self.finishes: list[str] = []
        self._own: dict[int, tuple[str, ...]] = {}
        self._keys: list[tuple[bytes, bytes]] = []  # contexts: (tools, options)
        self._contexts: dict[tuple[bytes, bytes], int] = {}
        # Only for nodes with several turns; (node, context) and (node, context, anchor) -> the turn to go on from.
        self._best: dict[tuple[int, ...], int] = {}
        # Only for nodes asked several times; (node, context, parent) -> turn.
        self._twins: set[tuple[int, int, int]] = set()

    def __len__(self) -> int:
        """How many turns: the row to read next."""
        return len(self.ids)

    def size_bytes(self) -> int:
        """About what the tree weighs in memory."""
        return 2000 + _NODE_BYTES * len(self._trie) + _TURN_BYTES * len(self.ids)

    def number(self, turn_id: str) -> int:
        return self._numbers.get(turn_id, -1)

    def messages(self, number: int) -> int:
        """How many messages a turn's conversation has, its reply included."""
        return self._trie.depth[self._ends[number]]

    def partial(self, number: int) -> bool:
        return bool(self._flags[number] & PARTIAL)

    def own_call_ids(self, number: int) -> tuple[str, ...]:
        """The model's own ids of the calls in a turn's reply, in order; "" where its format has none."""
        return self._own.get(number, ())

    def gone_on(self, number: int) -> bool:
        """Whether some turn goes on from this one."""
        return bool(self._flags[number] & PARENTED)

    def replied(self, node: int) -> bool:
        """Whether a completion was recorded right after this node."""
        return bool(self._trie.flags[node] & REPLIED)

    def replied_with(self, number: int, digests: bytes) -> bool:
        """Whether a turn, which does not run here, was added with the reply that ends these digests."""
        end = self._ends[number]
        return self._trie.child(self._trie.above[end], digests[-DIGEST_BYTES:]) == end

    def child(self, node: int, digest: bytes) -> int:
        """The node after one more message, -1: none."""
        return self._trie.child(node, digest)

    def goes_on(self, node: int, tools: bytes, options: bytes) -> bool:
        """Whether a turn ends at this node that a request under these tools and options can go on from."""
        here = self._trie.turn_at[node]
        context = self._contexts.get((tools, options), -1)
        if here < 0 or self._context_of[here] == context:
            return here >= 0
        return (node, context) in self._best

    def along(
        self, digests: Sequence[bytes], start: int, stop: int, node: int, tools: bytes, options: bytes
    ) -> tuple[int, int, int]:
        """How many of digests[start:stop] are on record after `node`, the node after them, and how many of them lead to where a
        turn ends that can be gone on from (`goes_on`); 0: none do."""
        nodes = self._trie.walk(map(digests.__getitem__, range(start, stop)), node)
        ends = len(nodes) - 1
        while ends and not self.goes_on(nodes[ends], tools, options):
            ends -= 1
        return len(nodes) - 1, nodes[-1], ends

    def turns_asked(self, digests: Sequence[bytes], tools: bytes, options: bytes, *, after: int = -1) -> list[int]:
        """Turns that were asked exactly these messages (after turn `after`), under these tools and options; newest first.

        Linear in how many there are, so not for every request. Turns added as running are not reliably among them, nor kept out.
        """
        nodes = self._trie.walk(digests, self._ends[after] if after >= 0 else ROOT)
        return list(self.asked_at(nodes[-1], tools, options)) if len(nodes) == len(digests) + 1 else []

    def asked_at(self, node: int, tools: bytes, options: bytes) -> Iterator[int]:
        """Turns that were asked at this node, under these tools and options, one by one; newest first."""
        number = self._trie.asked_at[node]
        while number >= 0:
            if self.has_prompt(number, node, tools, options):
                yield number
            number = self._asked_before[number]

    def has_prompt(self, number: int, node: int, tools: bytes, options: bytes) -> bool:
        """Whether this turn was asked at this node, under these tools and options, and has a reply there."""
        if self._trie.above[self._ends[number]] != node:
            return False
        return self._context_of[number] == self._contexts.get((tools, options), -1)

    def path(self, number: int) -> list[int]:
        """Turn numbers from the root to `number`; empty for -1."""
        path = []
        while number >= 0:
            path.append(number)
            number = self.parents[number]
        path.reverse()
        return path

    def add(self, row: IndexRow, *, running: bool = False) -> int:
        """Take in the next row of the session; returns its turn's number.

        running: the turn is still open and runs here: it has a place, and nobody can go on from it before `settle`.

        Raises: StenoError: the row can't be one (a parent that is not there yet, digests of a wrong length).
        """
        number = len(self.ids)
        if not -1 <= row.parent < number:
            raise StenoError(f"index row {number} ({row.turn_id}) names parent {row.parent}")
        if not row.digests or len(row.digests) % DIGEST_BYTES:
            raise StenoError(f"index row {number} ({row.turn_id}) has {len(row.digests)} bytes of digests")
        trie, history = self._trie, self._history
        digests = [row.digests[i : i + DIGEST_BYTES] for i in range(0, len(row.digests), DIGEST_BYTES)]
        reply = digests.pop()
        asked = self._ends[row.parent] if row.parent >= 0 else ROOT
        for digest in digests:
            asked = trie.grow(asked, digest)
            history.note_message(asked, digest)
        context = self._contexts.setdefault((row.tools, row.options), len(self._keys))
        if context == len(self._keys):
            self._keys.append((row.tools, row.options))
        self.ids.append(row.turn_id)
        self._numbers[row.turn_id] = number
        self.parents.append(row.parent)
        self._ends.append(asked)
        self.tokens.append(row.path_tokens)
        self.tokenizers.append(self._shared_key(row.tokenizer))
        self._context_of.append(context)
        self._flags.append(PARTIAL | BARREN)
        self.finishes.append(sys.intern(row.finish))
        self._anchors.append(self._anchors[row.parent] if row.parent >= 0 else -1)
        if row.parent >= 0:
            self._flags[row.parent] |= PARENTED
        if not running:
            self._reply(number, row, reply)
        self._note_prompt(number, asked)
        return number

    def _shared_key(self, key: bytes) -> bytes:
        """The same object as the turn before has, which nearly always has the same tokenizer."""
        return self.tokenizers[-1] if self.tokenizers and self.tokenizers[-1] == key else key

    def settle(self, number: int, row: IndexRow) -> None:
        """The turn that was added as running has ended; `row` is what is on record of it now."""
        self.tokens[number] = row.path_tokens
        self.finishes[number] = sys.intern(row.finish)
        self._reply(number, row, row.digests[-DIGEST_BYTES:])

    def _reply(self, number: int, row: IndexRow, reply: bytes) -> None:
        """How a turn ended, and where: from now on it can be gone on from."""
        asked = self._ends[number]
        end = self._ends[number] = self._trie.grow(asked, reply)
        barren = row.partial and row.completion_tokens == 0
        self._flags[number] = PARTIAL * row.partial | BARREN * barren
        if row.own_call_ids:
            self._own[number] = tuple(row.own_call_ids)
            self._anchors[number] = number
        if not barren:
            self._note_end(number, end)
            self._trie.flags[asked] |= REPLIED
            self._history.sampled(end, reply)

    def recognise(
        self, digests: Sequence[bytes], tools: bytes, options: bytes, call_ids: Sequence[Sequence[str]]
    ) -> Recognition:
        """Find the place of a request.

        Args:
            digests: `message_digest` of each of its messages. tools, options: their digests.
            call_ids: the tool-call ids in each message as the client sent them (`call_ids.echoed_ids`).
        """
        if not self.ids:
            return Recognition(-1, 0, None)
        trie = self._trie
        nodes = trie.walk(digests)
        shared = len(nodes) - 1
        context = self._contexts.get((tools, options), -1)
        parent, covered, deeper = -1, 0, -1
        for depth in range(shared, 0, -1):
            here = trie.turn_at[nodes[depth]]
            if here < 0:
                continue
            if trie.flags[nodes[depth]] & CROWDED:
                parent = self._among(nodes, depth, context, call_ids)
            elif self._context_of[here] == context:
                parent = here
            if parent >= 0:
                covered = depth
                break
            if deeper < 0:
                deeper = here
        if deeper >= 0:
            reason: ForkReason | None = self._changed(deeper, tools)
        elif parent >= 0 and not self._flags[parent] & PARENTED:
            reason = None
        elif shared == len(digests) and self._has_twin(nodes[shared], context, parent):
            reason = ForkReason.SIBLING
        else:
            reason = self._forked(digests, shared, nodes[shared], context, tools)
        return Recognition(parent, covered, reason)

    def _forked(self, digests: Sequence[bytes], shared: int, node: int, context: int, tools: bytes) -> ForkReason:
        """Rows 5 to 11 of the table in `fork.py`."""
        asked = self._trie.asked_at[node]
        if shared == len(digests) and asked >= 0 and self._context_of[asked] != context:
            return self._changed(asked, tools)
        reason = self._history.observe(digests, shared, node)
        if reason is not None:
            return reason
        return ForkReason.NEW_CONVERSATION if self._trie.flags[node] & LEAD else ForkReason.DIVERGED

    def _changed(self, turn: int, tools: bytes) -> ForkReason:
        same_tools = self._keys[self._context_of[turn]][0] == tools
        return ForkReason.OPTIONS_CHANGED if same_tools else ForkReason.TOOLS_CHANGED

    def _among(self, nodes: Sequence[int], depth: int, context: int, call_ids: Sequence[Sequence[str]]) -> int:
        """Of several turns that end at `nodes[depth]`, the one that echoed call ids name, else the preferred one."""
        best = self._best.get((nodes[depth], context), -1)
        if best < 0:
            return -1
        for ids in reversed(call_ids[:depth]):
            for call_id in ids:
                named = parse_call_id(call_id)
                number = self._numbers.get(named[0], -1) if named else -1
                if number < 0:
                    continue
                end = self._ends[number]
                at = self._trie.depth[end]
                if at > depth or nodes[at] != end:
                    continue
                found = self._best.get((nodes[depth], context, number), -1)  # itself, or below it
                if found >= 0:
                    return found
        return best

    def _has_twin(self, node: int, context: int, parent: int) -> bool:
        """Whether a turn was asked exactly this: after this parent, or as a root, since it could not be rendered after it.
        Equality proves no retry: identical siblings are legitimate."""
        asked = self._trie.asked_at[node]
        if asked < 0:
            return False
        if not self._trie.flags[node] & ASKED_AGAIN:
            return self._context_of[asked] == context and self.parents[asked] in (parent, -1)
        return (node, context, parent) in self._twins or (node, context, -1) in self._twins

    def _note_end(self, number: int, node: int) -> None:
        trie = self._trie
        first = trie.turn_at[node]
        trie.turn_at[node] = number
        if first >= 0 and not trie.flags[node] & CROWDED:
            trie.flags[node] |= CROWDED
            self._offer(first, node)
        if trie.flags[node] & CROWDED:
            self._offer(number, node)

    def _offer(self, number: int, node: int) -> None:
        context = self._context_of[number]
        self._prefer(self._best, (node, context), number)
        self._prefer(self._best, (node, context, self._anchors[number]), number)

    def _note_prompt(self, number: int, node: int) -> None:
        trie = self._trie
        first = trie.asked_at[node]
        trie.asked_at[node] = number
        self._asked_before.append(first)
        if first >= 0 and not trie.flags[node] & ASKED_AGAIN:
            trie.flags[node] |= ASKED_AGAIN
            self._twins.add((node, self._context_of[first], self.parents[first]))
        if trie.flags[node] & ASKED_AGAIN:
            self._twins.add((node, self._context_of[number], self.parents[number]))

    def _prefer(self, table: dict[tuple[int, ...], int], key: tuple[int, ...], number: int) -> None:
        """The newest that is not partial, else the newest."""
        held = table.get(key, -1)
        if held < 0 or (not self._flags[number] & PARTIAL, number) > (not self._flags[held] & PARTIAL, held):
            table[key] = number
