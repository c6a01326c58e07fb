"""What the proxy sees to by itself, every `sweep_s`: how full the store is, groups and sessions whose time is over, and what has
ended long ago.

Each step has a guard of its own: one that fails (at a record that can't be read, say) is logged and tried again in the next
sweep, and keeps nothing else from being done. The archive has a task of its own, since what it is kept on may be slow, or hang.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from steno.contracts.errors import StenoError
from steno_proxy.config.settings import ProxySettings
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.store_capacity import StoreCapacity
from steno_proxy.store.interface import SessionStore

if TYPE_CHECKING:
    from steno_proxy.archive.archiver import Archiver  # imports Redis, which not every proxy has

log = logging.getLogger(__name__)

ARCHIVED_AFTER_S = 86400.0
"""Where `retention_s` is unset: a day in which what has just ended is read from memory."""
TIGHT_S = 60.0
"""Where memory is short, sessions are archived so many seconds after their end: their harness may still ask for them. A session
whose group runs, or whose reward may still come, stays for the usual time."""

CLOCKS_DIFFER_S = 60.0
"""If the two clocks differ by more than this, it is logged once."""


class Sweeper:
    """Args: archiver: moves ended sessions to the archive; None: there is none, and they are deleted if `retention_s` is set.
    clock: this process's, Unix seconds."""

    def __init__(
        self, store: SessionStore, recorder: Recorder, settings: ProxySettings, capacity: StoreCapacity,
        archiver: Archiver | None, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._store = store
        self._recorder = recorder
        self._capacity = capacity
        self._archiver = archiver
        self._clock = clock
        self._clocks_differ = False  # and the log has it
        self._sweep_s = settings.sweep_s
        if archiver is not None or settings.retention_s is None:
            self._deleted_after_s = math.inf
        else:
            self._deleted_after_s = settings.retention_s
        self._archived_after_s = settings.retention_s or ARCHIVED_AFTER_S

    def start(self) -> set[asyncio.Task[None]]:
        """Its tasks. They run until they are cancelled."""
        looks = [self.sweep] if self._archiver is None else [self.sweep, self.archive]
        return {asyncio.create_task(self._again(look)) for look in looks}

    async def _again(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            await look()

    async def sweep(self) -> None:
        """All but the archive, once. Raises nothing."""
        await _guarded("asking the store how full it is", self._capacity.look)
        await _guarded("closing groups that are past their deadline", self._store.runs.close_due)
        await _guarded("deleting sessions that are past their retention", self._expire)
        await _guarded("ending sessions whose time is over", self._end_timed_out)

    async def archive(self) -> None:
        """One round. Raises nothing."""
        await _guarded("archiving sessions", self._archive)

    async def _earlier(self) -> float:
        """The earlier of this process's clock and the store's: by a clock that is ahead, sessions would be deleted too early."""
        here, there = self._clock(), await self._store.earliest()
        differ = abs(here - there) > CLOCKS_DIFFER_S
        if differ and not self._clocks_differ:
            log.warning(
                "the clock of this process is %.0f s %s the store's; sessions are deleted by the clock that is behind",
                abs(here - there), "ahead of" if here > there else "behind",
            )  # fmt: skip
        self._clocks_differ = differ
        return min(here, there)

    async def _end_timed_out(self) -> None:
        await self._recorder.end_timed_out(now=await self._store.earliest())

    async def _expire(self) -> None:
        dropped = await self._store.expire(now=await self._earlier(), retention_s=self._deleted_after_s)
        if dropped:
            log.info("%d sessions were past their retention of %.0f s and are deleted", dropped, self._deleted_after_s)

    async def _archive(self) -> None:
        assert self._archiver is not None
        early_s = TIGHT_S if self._capacity.tight else None
        if moved := await self._archiver.round(
            now=await self._store.earliest(), retention_s=self._archived_after_s, early_s=early_s
        ):
            log.info("%d sessions went to the archive", moved)


async def _guarded(what: str, step: Callable[[], Awaitable[Any]]) -> None:
    try:
        await step()
    except StenoError as error:
        log.warning("%s failed, it will be tried again: %s", what, error.message)
    except Exception:  # recorded: the rest goes on, and the log has it at each sweep
        log.exception("%s failed, it will be tried again", what)
