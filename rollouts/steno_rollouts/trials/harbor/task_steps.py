"""Which step of its task a trial is at: the proxy is told before each step's agent begins, and names it in the turns that
follow. The driver asks for that by a file that is named after the step's number, and goes on once it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from steno.contracts.errors import Gone, NotFound

log = logging.getLogger(__name__)

POLL_S = 0.1


class TaskSteps:
    """Of one trial. Args: folder: made here, empty. names: of the steps, in their order. begin: tells the proxy of one."""

    def __init__(self, folder: Path, names: Sequence[str], begin: Callable[[str], Awaitable[object]]) -> None:
        self.folder = folder
        self._names = names
        self._begin = begin

    @contextlib.asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Meanwhile the driver may ask.

        Raises: StenoError: the proxy could not be told. What runs inside is cancelled then: its turns would name the step before.
        """
        self.folder.mkdir()
        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._tell())
                yield
                telling.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _tell(self) -> None:
        while True:
            for asked in list(self.folder.iterdir()):
                name = self._names[int(asked.name) - 1]
                try:
                    await self._begin(name)
                except (
                    Gone,
                    NotFound,
                ) as error:  # its session has ended by a limit, say; or an older proxy has no steps
                    log.warning("%s: turns of step %r won't name it: %s", self.folder.parent.name, name, error.message)
                asked.unlink()
            await asyncio.sleep(POLL_S)
