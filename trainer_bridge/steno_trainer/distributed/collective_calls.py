"""Runs the same function on all ranks at the same time: the first rank decides which, the others follow.

Everything collective (a step, a checkpoint, a copy of the weights, a probe) is a duty: a function that all ranks call together.
The first rank calls `do`, in one thread, in the order of the calls; the others sit in `follow` until they are dismissed. What a
duty needs besides its name travels within it (`Ranks.share`), so a duty's argument on the followers is always None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import TrainerError

logger = logging.getLogger(__name__)
Duty = Callable[[Any], Any]
_DISMISSED = b""


class CollectiveCalls:
    """Args: duties: by name; the same names on every rank."""

    def __init__(self, ranks: Ranks, duties: Mapping[str, Duty]) -> None:
        self._ranks = ranks
        self._duties = dict(duties)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steno-crew")

    async def do(self, name: str, argument: Any = None) -> Any:
        """On the first rank: have every rank do this duty; returns what it returned here. Not cancelled by cancelling the
        caller: ranks that have begun together must end together.

        Raises: what the duty raised. If the other ranks had begun by then, they wait for this one without end: its process must
        end, and then the launcher ends them.
        """
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._do, name, argument)
        return await asyncio.shield(running)

    def follow(self) -> None:
        """On every other rank: do what the first one says, until it dismisses everybody."""
        while (name := self._ranks.share(None)) != _DISMISSED:
            self._duty(name.decode())(None)

    async def dismiss(self) -> None:
        """On the first rank: let the others go. Nothing can be done afterwards."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ranks.share, _DISMISSED)
        self._thread.shutdown()

    def _do(self, name: str, argument: Any) -> Any:
        duty = self._duty(name)
        self._ranks.share(name.encode())
        return duty(argument)

    def _duty(self, name: str) -> Duty:
        try:
            return self._duties[name]
        except KeyError:
            raise TrainerError(f"unknown collective call: {name!r}") from None
