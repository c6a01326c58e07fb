"""Which data-parallel rank a turn goes to: sticky by trial, bounded by load, as the proxy chooses workers. Pure.

Each rank has a KV cache of its own. vLLM chooses by load alone, so that a turn would mostly find nothing of its conversation.
"""

from __future__ import annotations

from hashlib import blake2b

LOAD_FACTOR = 1.25
"""How far over its share of all requests a rank may go before a trial's turn goes to the next in its order."""
SLACK_REQUESTS = 8
"""Loads below this are never called uneven: a lost prefix cache costs more than a batch of eight."""


class CacheRanks:
    """Requests that run on each of `count` ranks. One rank: there is nothing to choose. seats: that a rank runs at once."""

    def __init__(self, count: int, seats: int) -> None:
        self._running = [0] * count
        self._seats = seats

    def take(self, trial_id: str) -> int | None:
        """The rank of a turn of this trial, to be given back by `release`: the first in the trial's order that has a seat and no
        more than its share; else the first with a seat; else the least loaded. None: vLLM may choose."""
        count, running = len(self._running), self._running
        if count == 1 or not trial_id:
            return None
        order = sorted(range(count), key=lambda rank: blake2b(f"{trial_id}\0{rank}".encode(), digest_size=8).digest())
        most = max(SLACK_REQUESTS, LOAD_FACTOR * (sum(running) + 1) / count)
        free = [rank for rank in order if running[rank] < self._seats]
        if free:
            rank = next((rank for rank in free if running[rank] < most), free[0])
        else:
            rank = min(order, key=lambda rank: running[rank])
        running[rank] += 1
        return rank

    def release(self, rank: int | None) -> None:
        if rank is not None:
            self._running[rank] -= 1
