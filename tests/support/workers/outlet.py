"""Where streams speak, without a channel behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from steno.contracts.wire.frames import Frame


class Outlet:
    """Args: take: gets every frame. full: as a channel's on which too much waits, until `empty`."""

    def __init__(self, take: Callable[[Frame], None], *, full: bool = False) -> None:
        self.full = full
        self._take = take
        self._emptied = asyncio.Event()

    def __call__(self, frame: Frame) -> None:
        self._take(frame)

    async def room(self) -> None:
        await self._emptied.wait()

    def empty(self) -> None:
        self.full = False
        self._emptied.set()
