"""Refuses new trials when Redis is nearly full, since a full Redis refuses turns of running trials."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from steno.contracts.errors import NotFound, StoreFull
from steno_proxy import metrics
from steno_proxy.store.interface import SessionStore

log = logging.getLogger(__name__)

TIGHT = 0.7
"""From this share of the memory on, a warning is logged, and ended sessions are archived without waiting for `retention_s`,
unless their group runs or waits, or their reward may still come."""
FULL = 0.8
"""From this share of the memory on, no new trials are taken. What is left is for those that run."""
RETRY_S = 60.0


class StoreCapacity:
    """How full the store is, and whether it takes new trials."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._share = 0.0

    @property
    def tight(self) -> bool:
        return self._share >= TIGHT

    async def look(self) -> None:
        """Raises: StoreUnavailable."""
        before, share = self._share, await self._store.fullness()
        if share is None:
            return
        self._share = share
        metrics.STORE_FULLNESS.set(share)
        for bound, what in (
            (FULL, "no new trials are taken, running ones go on"),
            (TIGHT, "ended sessions that no group needs and that await no reward are archived at once"),
        ):
            if before < bound <= share:
                log.warning(
                    "Redis uses %.0f %% of its memory: %s; set archive, raise maxmemory, or complete open sessions and let the "
                    "trainer acknowledge its groups",
                    share * 100, what,
                )  # fmt: skip
                break

    async def check(self, known: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Check that a new trial may begin. known: reads what may be on record already; if it finds it, nothing is new.

        Raises: StoreFull; what `known` raises but for NotFound.
        """
        if self._share < FULL:
            return
        with contextlib.suppress(NotFound):
            if known is not None:
                await known()
                return
        await self.look()
        if self._share >= FULL:
            raise StoreFull(
                f"Redis uses {self._share:.0%} of its memory, and from {FULL:.0%} on no new trials are taken; those that run "
                "go on. Set archive, raise maxmemory, or complete open sessions and let the trainer acknowledge its groups",
                retry_after_s=RETRY_S,
            )
