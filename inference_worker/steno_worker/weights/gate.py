"""Holds back tokens of new weights until the weights have passed the probe.

Tokens that an engine samples between an update and its probe bear the new version's name. They leave when the probe has
passed, or never (I10). Until then they wait where a stream without credit waits: at the engine. Those of the old weights go on.
A stream that ran while weights were loaded that must not be used may have tokens of theirs, sent or not: it ends, whatever is
loaded by the time it is looked at.
"""

from __future__ import annotations

import asyncio

from steno.contracts.errors import EngineFailed


class WeightsGate:
    """Holds back what generations say until the weights are proved.

    Attributes: shut: to be looked at first, since it is once per delta; so is `era`: grows with every condemnation, and again
    when others have been proved. What began in an earlier one is over.
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
        """Whatever comes before the next `open` is of weights that must not be used, whichever version it bears."""
        self.shut, self._condemned, self._reason, self.era = True, True, reason, self.era + 1
        self._moved.set()

    async def passed(self, version: str = "", era: int | None = None) -> None:
        """Wait while it is shut to this version; "": to what bears none. Cancel-safe.

        Args: era: in which the stream began; None: this one. Raises: EngineFailed: condemned.
        """
        era = self.era if era is None else era
        while self.shut or era != self.era:
            if self._condemned or era != self.era:
                raise EngineFailed(f"the loaded weights are invalid: {self._reason}")
            if version != self._version:
                return
            await self._moved.wait()
