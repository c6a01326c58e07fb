"""Returns freed memory to the system after large bodies.

glibc keeps what was freed: when a block with its own mapping is freed, glibc raises its mmap threshold to the block's size, up to
32 MiB, and blocks below the threshold lie in a heap that shrinks only at its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys

from steno_proxy.api.bodies_in_flight import FREE_BYTES

log = logging.getLogger(__name__)

TRIM_AFTER_S = 1.0
"""Seconds from the first large body that is freed to the trim: what refers to the body has gone by then."""
_M_MMAP_THRESHOLD = -3


class HeapTrimmer:
    """Trims the heap of this process. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._libc = _glibc()

    def fix_threshold(self) -> None:
        """Blocks from FREE_BYTES on are mapped, and given back when they are freed, whatever was freed before."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, FREE_BYTES)

    def freed(self, size: int) -> None:
        """A body of `size` bytes was freed: trim the heap soon, once for all bodies that are freed until then."""
        if self._libc is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _trim(self) -> None:
        self._timer = None
        assert self._libc is not None
        self._libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
