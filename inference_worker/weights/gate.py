"""What streams pass on their way out: shut while new weights have not been proved yet.

Tokens that an engine samples between an update and its probe bear the new version's name. They leave when the probe has
passed, or never (I10). Until then they wait where a stream without credit waits: at the engine.
"""

from __future__ import annotations

import asyncio

from proxy.contracts.errors import EngineFailed


class Gate:
    """Attributes: shut: to be looked at first, since it is once per delta."""

    def __init__(self) -> None:
        self.shut = False
        self._condemned = ""
        self._moved = asyncio.Event()

    def close(self) -> None:
        """Whoever comes waits."""
        self.shut, self._condemned = True, ""
        self._moved.clear()

    def open(self) -> None:
        self.shut = False
        self._moved.set()

    def condemn(self, reason: str) -> None:
        """What waits, and whatever comes before the next `close`, is of weights that must not be used."""
        self.shut, self._condemned = True, reason
        self._moved.set()

    async def passed(self) -> None:
        """Wait while it is shut. Cancel-safe. Raises: EngineFailed: condemned."""
        while self.shut:
            if self._condemned:
                raise EngineFailed(f"the engine's weights are not to be used: {self._condemned}")
            await self._moved.wait()
