"""Forwarding a shard's bytes: to all who are there, no faster than they have room, and not at the pace of the slowest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from steno.contracts.wire.frames import Chunk, Progress
from steno_proxy.policies.update import UpdateRun
from steno_proxy.policies.upload import CHUNK_BYTES, PATIENCE_S, STALL_S, Upload
from tests.support.contracts.policy import spec

KIB = 1024
SIZE = 4096 * KIB


class Workers:
    """Workers that take `rate` bytes a second each, in a clock of their own; credit is given for what they have taken."""

    def __init__(self, rates: dict[str, int], window: int = 256 * KIB) -> None:
        asked = spec(1, transport="stream", location="", shards=1, size=SIZE)
        self.run = UpdateRun("u", asked, number=1, created_at=0.0, since=0.0, settle_until=0.0)
        self.now = 0.0
        self.rates, self.window = rates, window
        self.got: dict[str, bytearray] = {worker: bytearray() for worker in rates}
        self.taken: dict[str, float] = dict.fromkeys(rates, 0.0)
        for worker in rates:
            self.run.join(worker, "base/0", 0.0)
            self.report(worker)

    @property
    def name(self) -> str:
        return self.run.spec.manifest.shards[0].name

    def report(self, worker: str) -> None:
        have = int(self.taken[worker])
        credit = have + self.window - len(self.got[worker]) if self.rates[worker] else 0
        said = Progress("u", "receiving", have, self.name, len(self.got[worker]), max(0, credit))
        self.run.progress(worker, said, self.now)

    def send(self, worker: str, chunk: Chunk) -> None:
        assert chunk.offset == len(self.got[worker])
        self.got[worker] += chunk.data

    async def changed(self, timeout_s: float) -> None:
        """A twentieth of a second passes: everybody takes some and says so."""
        self.now += min(timeout_s, 0.05)
        for worker, rate in self.rates.items():
            self.taken[worker] = min(len(self.got[worker]), self.taken[worker] + rate * 0.05)
            self.report(worker)
        await asyncio.sleep(0)

    def upload(self, offset: int = 0, *, clock: Callable[[], float] | None = None) -> Upload:
        shard = self.run.spec.manifest.shards[0]
        return Upload(self.run, shard, offset, send=self.send, changed=self.changed, clock=clock or (lambda: self.now))


def content(start: int = 0, end: int = SIZE) -> bytes:
    return bytes(at % 251 for at in range(start, end))


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_all_get_all_of_it_in_chunks_of_a_bounded_size() -> None:
    workers = Workers({"a": 10_000 * KIB, "b": 10_000 * KIB})
    largest = 0

    def send(worker: str, chunk: Chunk) -> None:
        nonlocal largest
        largest = max(largest, len(chunk.data))
        Workers.send(workers, worker, chunk)

    workers.send = send  # type: ignore[method-assign]
    assert await workers.upload().forward(pieces(content(), 1 << 20)) == SIZE
    assert workers.got == {"a": content(), "b": content()}
    assert largest <= CHUNK_BYTES


async def test_one_that_stops_is_left_behind_and_asks_for_the_rest() -> None:
    workers = Workers({"fast": 1000 * KIB, "stops": 1000 * KIB})

    async def body() -> AsyncIterator[bytes]:
        yield content(0, 1024 * KIB)
        workers.rates["stops"] = 0
        yield content(1024 * KIB)

    assert await workers.upload().forward(body()) == SIZE
    assert workers.got["fast"] == content()
    assert workers.now <= 2 * SIZE / (1000 * KIB) + PATIENCE_S
    left = len(workers.got["stops"])
    assert 0 < left < SIZE
    assert workers.run.wants() == [], "it has no room"
    workers.rates["stops"] = 1000 * KIB
    await workers.changed(1.0)
    assert [want.offset for want in workers.run.wants()] == [left]


async def test_one_that_is_past_its_deadline_or_came_late_holds_up_nobody() -> None:
    alone = Workers({"fast": 1000 * KIB})
    await alone.upload().forward(pieces(content()))
    for late in (True, False):
        workers = Workers({"fast": 1000 * KIB, "slow": 10 * KIB})
        slow = workers.run.members["slow"]
        slow.awaited = not late
        if not late:
            slow.state = "failed"
            workers.report = lambda worker, report=workers.report: report(worker) if worker == "fast" else None  # type: ignore
        assert await workers.upload().forward(pieces(content())) == SIZE
        assert workers.now <= alone.now + 0.1
        assert len(workers.got["slow"]) < SIZE


async def test_one_that_is_only_slower_is_waited_for() -> None:
    """All are to load together, and what it missed would have to be uploaded again."""
    workers = Workers({"a": 2000 * KIB, "b": 800 * KIB, "c": 700 * KIB})
    assert await workers.upload().forward(pieces(content())) == SIZE
    assert all(got == content() for got in workers.got.values())


async def test_without_room_anywhere_it_gives_the_body_back() -> None:
    workers = Workers({"a": 0, "b": 0})
    assert await workers.upload().forward(pieces(content())) == 0
    assert workers.now >= STALL_S


async def test_who_is_further_on_joins_where_it_is() -> None:
    workers = Workers({"a": 10_000 * KIB, "b": 10_000 * KIB})
    workers.got["b"] += content(0, 150_000)
    workers.taken["b"] = 150_000
    workers.report("b")
    assert await workers.upload().forward(pieces(content())) == SIZE
    assert workers.got == {"a": content(), "b": content()}


async def test_two_uploads_of_the_same_bytes_send_them_once() -> None:
    workers = Workers({"a": 10_000 * KIB})
    first, second = workers.upload(), workers.upload()
    ends = await asyncio.gather(first.forward(pieces(content())), second.forward(pieces(content())))
    assert max(ends) == SIZE
    assert workers.got["a"] == content()


async def test_it_ends_when_a_newer_update_takes_its_place() -> None:
    workers = Workers({"a": 10_000 * KIB})

    async def body() -> AsyncIterator[bytes]:
        yield content(0, 1000)
        workers.run.supersede(workers.now)
        yield content(1000, 2000)

    assert await workers.upload().forward(body()) == 1000


async def test_more_than_the_shard_has_is_not_passed_on() -> None:
    workers = Workers({"a": 100_000 * KIB}, window=SIZE)
    assert await workers.upload().forward(pieces(content() + b"beyond")) == SIZE
    assert len(workers.got["a"]) == SIZE
