"""A trie over message digests, and nothing about turns: where each message of a session was said, after which others.

A node is a conversation up to one message. It is append-only, flat (a dict of edges, arrays by node), and answers three
questions in time that does not grow with the session: the child by a digest, the longest recorded beginning of a list of
digests, the ancestor at a depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from steno_proxy.sessions.messages.normalise import SYSTEM

ROOT = 0
LEAD, REPLIED, CROWDED, ASKED_AGAIN = 1, 2, 4, 8
"""Node flags. LEAD: system messages and nothing else so far. The others are the tree's, set by it. REPLIED: a completion was
recorded right after this node. CROWDED: several turns end here. ASKED_AGAIN: several turns were asked here."""


class Trie:
    """A trie of message digests. Nodes are numbered from 0, which is the empty conversation; -1 means none.

    above: parent node. depth: how many messages. flags: see above. turn_at, asked_at: the newest turn that can be gone on
    from and ends here, and the newest that was asked here (its reply comes right after), -1: none.
    """

    __slots__ = ("_edges", "_jump", "above", "asked_at", "depth", "flags", "turn_at")

    def __init__(self) -> None:
        self._edges: dict[bytes, int] = {}
        self._jump = array("i", [ROOT])
        self.above = array("i", [ROOT])
        self.depth = array("i", [0])
        self.flags = bytearray([LEAD])
        self.turn_at = array("i", [-1])
        self.asked_at = array("i", [-1])

    def __len__(self) -> int:
        return len(self.above)

    def child(self, node: int, digest: bytes) -> int:
        return self._edges.get(digest + node.to_bytes(4, "little"), -1)

    def grow(self, node: int, digest: bytes) -> int:
        """The child by this digest, made if there is none."""
        key = digest + node.to_bytes(4, "little")
        found = self._edges.get(key, -1)
        if found >= 0:
            return found
        new = len(self.above)
        self._edges[key] = new
        jump, depth = self._jump, self.depth
        # Myers' jump pointers (An applicative random-access stack, 1983): the ancestor at any depth in O(log depth) for
        # four bytes a node.
        far = jump[node]
        jump.append(jump[far] if depth[node] - depth[far] == depth[far] - depth[jump[far]] else node)
        depth.append(depth[node] + 1)
        self.above.append(node)
        self.flags.append(LEAD if self.flags[node] & LEAD and digest[0] == SYSTEM else 0)
        self.turn_at.append(-1)
        self.asked_at.append(-1)
        return new

    def walk(self, digests: Iterable[bytes], start: int = ROOT) -> list[int]:
        """Nodes of the longest recorded beginning: element i is the node after i messages, element 0 where it starts."""
        edges, node, nodes = self._edges, start, [start]
        for digest in digests:
            node = edges.get(digest + node.to_bytes(4, "little"), -1)
            if node < 0:
                break
            nodes.append(node)
        return nodes

    def ancestor(self, node: int, depth: int) -> int:
        """The node at `depth` on the way from the root to `node`, which must be at least that deep."""
        while self.depth[node] > depth:
            far = self._jump[node]
            node = far if self.depth[far] >= depth else self.above[node]
        return node
