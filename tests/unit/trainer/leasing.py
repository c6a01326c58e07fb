"""The proxy as a trainer that leases sees it, played at its client's seam: losses at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from steno.contracts.errors import StenoError
from steno.contracts.records import Group, Sample, SampledRange, Session, TokenSpan, Turn
from steno.contracts.rest import SampleList, UnreadableTurn
from steno.contracts.runs.leases import Lease, LeaseRequest


@dataclass
class FakeProxy:
    """Serves what is in `ready`, once each; `failures` are raised by the calls of that name, in order, and those in `hold` wait
    for their event first."""

    ready: list[Lease] = field(default_factory=list)
    samples_of: dict[str, list[Sample]] = field(default_factory=dict)
    unreadable_of: dict[str, list[UnreadableTurn]] = field(default_factory=dict)
    turns_of: dict[str, list[Turn]] = field(default_factory=dict)
    failures: dict[str, list[StenoError]] = field(default_factory=dict)
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    acknowledged: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    granted: dict[str | None, list[Lease]] = field(default_factory=dict)
    answer: asyncio.Event | None = None
    """What answers to requests for leases wait for, once they have been granted."""
    in_vain: int = 0
    """Requests for leases that bring nothing, before all others."""

    async def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.hold:
            await self.hold[name].wait()
        if self.failures.get(name):
            raise self.failures[name].pop(0)

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        if request.request_id in self.granted or not request.max_groups:
            return self.granted.get(request.request_id, [])
        await self._call("lease")
        if self.in_vain:
            self.in_vain -= 1
            return []
        while not self.ready:
            self.came.clear()
            await self.came.wait()
        taken, self.ready = self.ready[: request.max_groups], self.ready[request.max_groups :]
        self.granted[request.request_id] = taken
        if self.answer is not None:
            await self.answer.wait()
        return taken

    def serve(self, *leases: Lease) -> None:
        self.ready += leases
        self.came.set()

    async def acknowledge(self, lease_id: str) -> None:
        await self._call("acknowledge")
        self.acknowledged.append(lease_id)

    async def release(self, lease_id: str) -> None:
        await self._call("release")
        self.released.append(lease_id)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False) -> None:
        await self._call("extend")
        self.extended.append(lease_id + " used" * used)

    async def sample_list(self, trial_id: str) -> SampleList:
        await self._call("samples")
        items = self.samples_of.get(trial_id, [sample(trial_id)])
        return SampleList(items=items, unreadable=self.unreadable_of.get(trial_id, []))

    async def turns(self, trial_id: str) -> AsyncIterator[Turn]:
        await self._call("turns")
        for turn in self.turns_of.get(trial_id, []):
            yield turn


def lease(group_id: str, *trials: str, gone: tuple[str, ...] = (), tokens: int = 4) -> Lease:
    return Lease(
        lease_id=f"lease-{group_id}",
        group=Group(group_id=group_id, size=len(trials) + len(gone), created_at=0.0),
        trials=[
            Session(trial_id=trial, group_id=group_id, reward=1.0, created_at=0.0, updated_at=0.0) for trial in trials
        ],
        tokens={trial: {"a/1": tokens} for trial in (*trials, *gone)},
        expires_at=1e12,
    )


def sample(trial_id: str, sampled: int = 4) -> Sample:
    return Sample(
        trial_id=trial_id, leaf_id="0", turn_ids=["0"], token_ids=bytes(4 * sampled), loss_mask=bytes(sampled),
        sampling_logprobs=bytes(4 * sampled), spans=[TokenSpan(version="a/1", start=0, end=sampled)],
        completions=[SampledRange(start=0, end=sampled)],
    )  # fmt: skip
