"""A proxy at the client's seam: what it answers is scripted, what it was asked is on record. Nothing here sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from steno.contracts.errors import NotFound
from steno.contracts.policy import Update, UpdateSpec, Want, WorkerUpdate


class FakeProxy:
    """Knows the updates posted to it, until `forget`. `faults`: raised, one for each call, before anything else is done;
    `refusals`: the same of uploads alone."""

    def __init__(self) -> None:
        self.specs: dict[str, UpdateSpec] = {}
        self.calls: list[str] = []
        self.faults: list[Exception] = []
        self.refusals: list[Exception] = []
        self.workers: list[WorkerUpdate] = []
        self.wants: list[Want] = []
        self.state: Any = "done"
        self.received: dict[str, bytes] = {}
        self.take: Callable[[str, int], int] = lambda name, offset: 1 << 40
        self.changed = asyncio.Event()

    def forget(self) -> None:
        self.specs.clear()

    async def post_update(self, spec: UpdateSpec) -> Update:
        self._call(f"post {spec.version}")
        self.specs[f"u-{spec.version}"] = spec
        return self._view(f"u-{spec.version}")

    async def update(self, update_id: str, *, wait_s: float = 0.0) -> Update:
        self._call(f"get {update_id}")
        if wait_s and update_id in self.specs and not self._view(update_id).wants:
            await self.changed.wait()
        self.changed.clear()
        if update_id not in self.specs:
            raise NotFound(f"no update {update_id}")
        return self._view(update_id)

    async def upload_shard(self, update_id: str, name: str, offset: int, data: AsyncIterator[bytes]) -> int:
        self._call(f"put {name} {offset}")
        if self.refusals:
            raise self.refusals.pop(0)
        room = self.take(name, offset)
        async for chunk in data:
            taken = chunk[:room]
            room -= len(taken)
            assert len(self.received.get(name, b"")) == offset
            self.received[name] = self.received.get(name, b"") + taken
            offset += len(taken)
            if not room:
                break
        self.wants = self._missing(update_id)
        return offset

    def _missing(self, update_id: str) -> list[Want]:
        lacking = (
            (shard.name, len(self.received.get(shard.name, b"")), shard.size)
            for shard in self.specs[update_id].manifest.shards
        )
        return [Want(shard=name, offset=there) for name, there, size in lacking if there < size][:1]

    def ask_for_everything(self, update_id: str) -> None:
        self.received.clear()
        self.wants = self._missing(update_id)
        self.changed.set()

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.faults:
            raise self.faults.pop(0)

    def _view(self, update_id: str) -> Update:
        spec = self.specs[update_id]
        return Update(
            update_id=update_id,
            version=spec.version,
            transport=spec.transport,
            state=self.state,
            workers=self.workers,
            wants=self.wants,
            created_at=1.0,
        )
