"""Where a trie that is too large for one micro-batch is cut, so that the fewest tokens are computed again. Pure.

A piece is a run of neighbours in the forest's order. Cutting before a sample repeats what it shares with the one before it, so
the best cuts are a shortest path over the places where one may cut. A run that fits goes on fitting when it loses a sample at
either end: the window of possible last cuts only moves on, and the least of it is kept in a queue, so the search is linear in
the samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

Fits = Callable[[int, int], bool]
"""Whether the samples first … last (places, both included) are one piece."""


def fewest_repeats(trie: range, shared: Sequence[int], fits: Fits) -> list[range]:
    """The pieces of a trie, cut so that the fewest tokens are repeated; among such cuts, one into the fewest pieces.

    Args: trie: places in the forest's order. shared: the forest's. fits: not asked for a single sample, which is never cut; must
        be true for every run inside a run that fits.
    """
    # best[n]: (tokens repeated, pieces) of the first n samples.
    best: list[tuple[int, int]] = [(0, 0)]
    came_from = [0]
    queue: deque[tuple[tuple[int, int], int]] = (
        deque()
    )  # (cost up to and with a cut before it, sample), ascending in both
    for count in range(1, len(trie) + 1):
        newest = count - 1
        repeated, pieces = best[newest]
        cost = (repeated + (shared[trie[newest]] if newest else 0), pieces + 1)
        while queue and queue[-1][0] > cost:
            queue.pop()
        queue.append((cost, newest))
        while queue[0][1] < newest and not fits(trie[queue[0][1]], trie[newest]):
            queue.popleft()
        best.append(queue[0][0])
        came_from.append(queue[0][1])
    found: list[range] = []
    end = len(trie)
    while end:
        start = came_from[end]
        found.append(trie[start:end])
        end = start
    return found[::-1]
