"""Trainers that lease a run's groups and acknowledge them, or let go of them, as their schedule says. A second one works beside
the first, or takes the run over from it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, StenoError, Superseded
from steno.contracts.runs.leases import Lease, LeaseRequest

TTL_S = 2.0
PATIENCE_S = 120.0


@dataclass
class Taken:
    """What all trainers of a run have taken.

    Attributes: acknowledged: group_id -> the leases whose acknowledgement was accepted. refused: those that were not.
        superseded: trainers that were told that they are. taken_over_at: when a successor had the run; monotonic.
        wrong: what must not be, in words.
    """

    acknowledged: dict[str, list[Lease]] = field(default_factory=dict)
    refused: int = 0
    grants: int = 0
    superseded: int = 0
    taken_over_at: float | None = None
    wrong: list[str] = field(default_factory=list)


class Trainer:
    """Args: clients: one per replica, asked in turn.  plan: what becomes of each lease; after that all are
    acknowledged. epoch: of one that registered.

    Attributes: idle: it waits for leases, and has heard what became of those that it had.
    """

    def __init__(
        self, clients: Sequence[AsyncClient], run_id: str, plan: tuple[str, ...], taken: Taken | None = None, *,
        name: str = "chaos", epoch: int | None = None,
    ) -> None:  # fmt: skip
        self.taken = taken or Taken()
        self.idle = asyncio.Event()
        self.idle.set()
        self._clients = clients
        self._run_id = run_id
        self._plan = list(plan)
        self._name = name
        self._epoch = epoch
        self._calls = 0

    async def run(self, groups: int) -> None:
        """Lease groups until so many have been acknowledged, or another trainer has the run. A call that fails is repeated; a
        lease in a lost answer runs out."""
        while len(self.taken.acknowledged) < groups:
            request = LeaseRequest(run_id=self._run_id, consumer=self._name, wait_s=0.5, ttl_s=TTL_S, max_groups=2)
            asked_at = time.monotonic()
            try:
                leases = await self._client().lease(request)
                self._check_epoch(asked_at, "was given leases")
            except Superseded:
                self.taken.superseded += 1
                return
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
            asked_at = time.monotonic()
            try:
                if how == "release":
                    await self._client().release(lease.lease_id)
                else:
                    await self._client().acknowledge(lease.lease_id)
                    self._check_epoch(asked_at, "could acknowledge")
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
        """Extend the lease beyond its first term. Whether the calls came in time shows when it is acknowledged."""
        for used in (False, False, True):
            await asyncio.sleep(TTL_S / 2)
            with contextlib.suppress(StenoError):
                await self._client().extend(lease.lease_id, TTL_S, used=used)

    def _check_epoch(self, asked_at: float, what: str) -> None:
        over = self.taken.taken_over_at
        if self._epoch == 1 and over is not None and asked_at > over:
            self.taken.wrong.append(f"I4: the trainer of epoch 1 {what}, though another one had the run by then")

    def _client(self) -> AsyncClient:
        self._calls += 1
        return self._clients[self._calls % len(self._clients)]


class Trainers:
    """All of a run. Args: open_client: one of a replica, by its number and an epoch. second: as in `schedule.Schedule`."""

    def __init__(
        self, open_client: Callable[[int, int | None], AsyncClient], replicas: int, run_id: str, plan: tuple[str, ...],
        second: str, second_at_s: float,
    ) -> None:  # fmt: skip
        self.taken = Taken()
        self._open_client = open_client
        self._replicas = replicas
        self._run_id = run_id
        self._plan = plan
        self._second = second
        self._second_at_s = second_at_s
        self._all: list[Trainer] = []

    @property
    def idle(self) -> bool:
        return all(trainer.idle.is_set() for trainer in self._all)

    async def run(self, groups: int) -> None:
        """Until so many groups have been acknowledged."""
        registers = self._second == "successor"
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            first = await self._trainer(stack, "first", self._plan, registers=registers)
            tasks.create_task(first.run(groups))
            if self._second:
                await asyncio.sleep(self._second_at_s)
                second = await self._trainer(stack, "second", self._plan[::-1], registers=registers)
                if registers:
                    self.taken.taken_over_at = time.monotonic()
                tasks.create_task(second.run(groups))

    async def _trainer(self, stack: AsyncExitStack, name: str, plan: tuple[str, ...], *, registers: bool) -> Trainer:
        epoch = await self._register(name) if registers else None
        clients = [
            await stack.enter_async_context(self._open_client(number, epoch)) for number in range(self._replicas)
        ]
        trainer = Trainer(clients, self._run_id, plan, self.taken, name=name, epoch=epoch)
        self._all.append(trainer)
        return trainer

    async def _register(self, name: str) -> int:
        """Take the run over. Returns: the epoch. A repeated call, after a lost answer, gets the same epoch for the same name."""
        until = time.monotonic() + PATIENCE_S
        for number in range(10**6):
            async with self._open_client(number % self._replicas, None) as client:
                try:
                    return (await client.take_over(self._run_id, name, force=True)).epoch
                except StenoError as error:
                    if not error.retryable or time.monotonic() > until:
                        raise
            await asyncio.sleep(0.1)
        raise AssertionError
