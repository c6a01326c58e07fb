"""Long work in slices, so that everybody else goes on meanwhile.

The event loop is one thread, and what large requests cost (JSON, digests, frames, compression) holds it: a thread of its own
would compete for the interpreter and hold it all the same ([ADR 14](docs/adr/0014-large-bodies.md) has the numbers). So such
work is cut into slices, and before each of them one waits for its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

SLICE_S = 0.01
"""How long a slice is, about, where the work can be cut anywhere. Seconds."""
LARGE_BYTES = 1 << 18
"""Work on less than this is one slice, and waits for no turn: it takes a few milliseconds."""
MANY = 1024
"""The same, of messages and tools."""


STEPS_BETWEEN = 8
"""Turns of the event loop between two slices. What became ready during a slice stands behind the next one in the loop's queue if
that is there already, so that with one turn between them each step of somebody else's request would wait for one slice more. A
turn in which nobody has anything to do takes a few microseconds."""


class Pace:
    """One for a process. One slice of one request is worked on at a time, requests in turn, and between two slices everybody else
    takes what steps are ready."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for the turn of a slice, which begins when this returns and ends with the caller's next `await`. Cancel-safe."""
        async with self._lock:
            for _ in range(STEPS_BETWEEN):
                await asyncio.sleep(0)

    async def steps(self, work: Iterable[object]) -> None:
        """Exhaust an iterator that does some work at each step, in slices of SLICE_S or one step. Raises what it raises."""
        await self.turn()
        until = time.perf_counter() + SLICE_S
        for _ in work:
            if time.perf_counter() >= until:
                await self.turn()
                until = time.perf_counter() + SLICE_S
