"""Which step of its task a trial is at: the proxy is told before each step's agent begins, and names it in the turns that
follow. The driver asks for that by a file that is named after the step's number, and goes on once it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from steno.contracts.errors import Gone, NotFound, StenoError

log = logging.getLogger(__name__)

POLL_S = 0.1
PATIENCE_S = 300.0
"""For a proxy, or a store, that is away: what an outage costs is a wait before the agent begins, and no trial."""
RETRY_S = 1.0


class NotTold(StenoError):
    """The proxy could not be told of a step. Never leaves the executor: it ends that one trial. began: an agent has begun, at an
    earlier step."""

    code = "not_told"

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class TaskSteps:
    """Of one trial. Args: folder: made here, empty. names: of the steps, in their order. begin: tells the proxy of one."""

    def __init__(self, folder: Path, names: Sequence[str], begin: Callable[[str], Awaitable[object]]) -> None:
        self.folder = folder
        self._names = names
        self._begin = begin

    @contextlib.asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Meanwhile the driver may ask.

        Raises: NotTold. What runs inside is cancelled then: its turns would name the step before.
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
                await self._tell_of(int(asked.name))
                asked.unlink()
            await asyncio.sleep(POLL_S)

    async def _tell_of(self, number: int) -> None:
        name, trial = self._names[number - 1], self.folder.parent.name
        until, said, why = time.monotonic() + PATIENCE_S, False, f"no answer for {PATIENCE_S:g} s"
        while True:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):  # its client may ask without an end
                    await self._begin(name)
                return
            except TimeoutError:
                raise NotTold(f"the proxy can't be told of step {name!r}: {why}", began=number > 1) from None
            except (Gone, NotFound) as error:  # its session has ended by a limit, say; or an older proxy has no steps
                log.warning("%s: turns of step %r won't have the step's name: %s", trial, name, error.message)
                return
            except StenoError as error:
                if not error.retryable or time.monotonic() >= until:
                    raise NotTold(
                        f"the proxy can't be told of step {name!r}: {error.message}", began=number > 1
                    ) from error
                if not said:
                    log.warning("%s: step %r waits to begin: %s", trial, name, error.message)
                said, why = True, error.message
            await asyncio.sleep(RETRY_S)
