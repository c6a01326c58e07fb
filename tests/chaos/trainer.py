"""A trainer that leases a run's groups and acknowledges them, or lets go of them, as its schedule says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from proxy.client import AsyncSteno
from proxy.contracts.errors import Conflict, StenoError
from proxy.contracts.leases import Lease, LeaseRequest

TTL_S = 2.0


@dataclass
class Taken:
    """Attributes: acknowledged: group_id -> the leases whose acknowledgement was accepted. refused: those that were not."""

    acknowledged: dict[str, list[Lease]] = field(default_factory=dict)
    refused: int = 0
    grants: int = 0


class Trainer:
    """Args: clients: one per replica, asked in turn.  plan: what becomes of each lease; after that all are acknowledged.

    Attributes: idle: it waits for leases, and has heard what became of those that it had.
    """

    def __init__(self, clients: list[AsyncSteno], run_id: str, plan: tuple[str, ...]) -> None:
        self.taken = Taken()
        self.idle = asyncio.Event()
        self.idle.set()
        self._clients = clients
        self._run_id = run_id
        self._plan = list(plan)
        self._calls = 0

    async def run(self, groups: int) -> None:
        """Until so many groups have been acknowledged. A lost answer is asked for again: the lease runs out otherwise."""
        while len(self.taken.acknowledged) < groups:
            request = LeaseRequest(run_id=self._run_id, consumer="chaos", wait_s=0.5, ttl_s=TTL_S, max_groups=2)
            try:
                leases = await self._client().lease(request)
            except StenoError:
                await asyncio.sleep(0.2)
                continue
            self.idle.clear()
            for lease in leases:
                self.taken.grants += 1
                await self._decide(lease, self._plan.pop(0) if self._plan else "ack")
            self.idle.set()

    async def _decide(self, lease: Lease, how: str) -> None:
        if how == "lapse":
            return
        if how == "late":
            await asyncio.sleep(TTL_S + 0.3)
        if how == "extend":
            await self._hold(lease)
        while True:
            try:
                if how == "release":
                    await self._client().release(lease.lease_id)
                else:
                    await self._client().acknowledge(lease.lease_id)
                    self.taken.acknowledged.setdefault(lease.group.group_id, []).append(lease)
                return
            except Conflict:
                self.taken.refused += 1
                return
            except StenoError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.2)

    async def _hold(self, lease: Lease) -> None:
        """Keep it for longer than its term, by extending it; whether that came in time its acknowledgement tells."""
        for used in (False, False, True):
            await asyncio.sleep(TTL_S / 2)
            with contextlib.suppress(StenoError):
                await self._client().extend(lease.lease_id, TTL_S, used=used)

    def _client(self) -> AsyncSteno:
        self._calls += 1
        return self._clients[self._calls % len(self._clients)]
