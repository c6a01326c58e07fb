"""What streams pass on their way out: shut to tokens of new weights that have not been proved yet.

Tokens that an engine samples between an update and its probe bear the new version's name. They leave when the probe has
passed, or never (I10). Until then they wait where a stream without credit waits: at the engine. Those of the old weights go on.
"""

from __future__ import annotations

import asyncio

from proxy.contracts.errors import EngineFailed


class Gate:
    """Attributes: shut: to be looked at first, since it is once per delta."""

    def __init__(self) -> None:
        self.shut = False
        self._version = ""
        self._condemned = ""
        self._moved = asyncio.Event()

    def close(self, version: str) -> None:
        """What bears this version waits."""
        self.shut, self._version, self._condemned = True, version, ""
        self._moved.clear()

    def open(self) -> None:
        self.shut = False
        self._moved.set()

    def condemn(self, reason: str) -> None:
        """Whatever comes before the next `close` is of weights that must not be used, whichever version it bears."""
        self.shut, self._condemned = True, reason
        self._moved.set()

    async def passed(self, version: str = "") -> None:
        """Wait while it is shut to this version; "": to what bears none. Cancel-safe. Raises: EngineFailed: condemned."""
        while self.shut:
            if self._condemned:
                raise EngineFailed(f"the engine's weights are not to be used: {self._condemned}")
            if version != self._version:
                return
            await self._moved.wait()
