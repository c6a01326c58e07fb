"""Which turns of a trial are of which step: its turns are counted as each step's agent ends. The driver asks for that by a file
that is named after the step's number, and goes on once it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from steno.contracts.errors import StenoError

log = logging.getLogger(__name__)

POLL_S = 0.1


class StepTurns:
    """Of one trial. Args: folder: made here, empty. count: how many turns it has on record."""

    def __init__(self, folder: Path, count: Callable[[], Awaitable[int]]) -> None:
        self.folder = folder
        self._count = count
        self._ends: dict[int, int] = {}

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Meanwhile the driver may ask."""
        self.folder.mkdir()
        answering = asyncio.create_task(self._answer())
        try:
            yield
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def of(self, names: Sequence[str]) -> dict[str, int]:
        """By the names of the steps that ran, in their order; empty where one could not be counted."""
        ends = [self._ends.get(number) for number in range(1, len(names) + 1)]
        if None in ends:
            return {}
        known = [0, *(end for end in ends if end is not None)]
        return {name: after - before for name, (before, after) in zip(names, itertools.pairwise(known), strict=True)}

    async def _answer(self) -> None:
        while True:
            for asked in list(self.folder.iterdir()):
                try:
                    self._ends[int(asked.name)] = await self._count()
                except StenoError as error:
                    log.warning("%s: turns were not counted: %s", asked, error.message)
                asked.unlink()
            await asyncio.sleep(POLL_S)
