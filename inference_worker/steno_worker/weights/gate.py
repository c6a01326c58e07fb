"""Holds back tokens of new weights until the weights have passed the probe.

Tokens that an engine samples between an update and its probe bear the new version's name. They leave when the probe has
passed, or never (I10). Until then they wait where a stream without credit waits: at the engine. Tokens of the old weights pass.
If the loaded weights turn out to be invalid, every stream that ran meanwhile may have tokens of them, sent or not: it ends, even
if valid weights are loaded again by then.
"""

from __future__ import annotations

import asyncio

from steno.contracts.errors import EngineFailed


class WeightsGate:
    """Holds back what generations say until the weights are proved.

    Attributes: shut: callers check it, and `era`, for each delta, and call `passed` only if need be. era: grows with each
    `condemn`, and with the `open` after it. A stream that began in an earlier era must end.
    """

    def __init__(self) -> None:
        self.shut = False
        self.era = 0
        self._version = ""
        self._condemned = False
        self._reason = ""
        self._moved = asyncio.Event()

    def close(self, version: str) -> None:
        """What bears this version waits."""
        self.shut, self._version = True, version
        self._moved.clear()

    def open(self) -> None:
        self.shut = False
        if self._condemned:
            self._condemned, self.era = False, self.era + 1
        self._moved.set()

    def condemn(self, reason: str) -> None:
        """The loaded weights must not be used: until the next `open` no event passes, whichever version it bears."""
        self.shut, self._condemned, self._reason, self.era = True, True, reason, self.era + 1
        self._moved.set()

    async def passed(self, version: str = "", era: int | None = None) -> None:
        """Wait while the gate is shut to this version ("": the event bears none). Cancel-safe.

        Args: era: in which the stream began; None: the present one. Raises: EngineFailed: the weights were condemned.
        """
        era = self.era if era is None else era
        while self.shut or era != self.era:
            if self._condemned or era != self.era:
                raise EngineFailed(f"the loaded weights are invalid: {self._reason}")
            if version != self._version:
                return
            await self._moved.wait()
