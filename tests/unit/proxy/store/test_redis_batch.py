"""Batches share round trips, and nothing else: not errors, not waits, not a caller's cancellation."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from steno.contracts.errors import StoreUnavailable
from steno_proxy.store.redis.link.batch import BATCH_BYTES, BATCH_COMMANDS, LANES, Batches

Reply = Any


class Server:
    """redis-py's pipelines as far as `Batches` uses them: echoes each command once `gate` is open, or fails the round trip."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.trips: list[list[tuple[Any, ...]]] = []
        self.broken: Exception | None = None

    def pipeline(self, transaction: bool) -> Pipeline:
        assert not transaction
        return Pipeline(self)


class Pipeline:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.commands: list[tuple[Any, ...]] = []

    def execute_command(self, *command: Any) -> None:
        self.commands.append(command)

    async def execute(self, raise_on_error: bool) -> list[Reply]:
        assert not raise_on_error
        self.server.trips.append(self.commands)
        await self.server.gate.wait()
        if self.server.broken is not None:
            raise self.server.broken
        return [ResponseError("no") if command[0] == "BAD" else command for command in self.commands]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def occupy(batches: Batches) -> list[asyncio.Task[list[Reply]]]:
    """Every lane with one command that is not answered yet."""
    tasks = []
    for number in range(LANES):
        tasks.append(asyncio.create_task(batches.submit([("E", number)])))
        await settle()
    return tasks


async def test_who_is_alone_is_sent_at_once_and_answered_in_order() -> None:
    server = Server()
    assert await Batches(server, 1.0).submit([("A",), ("B", b"x")]) == [("A",), ("B", b"x")]
    assert server.trips == [[("A",), ("B", b"x")]]


async def test_what_is_asked_while_the_lanes_are_busy_leaves_together() -> None:
    server = Server()
    server.gate.clear()
    batches = Batches(server, 1.0)
    early = await occupy(batches)
    late = [asyncio.create_task(batches.submit([("L", n), ("M", n)])) for n in range(20)]
    await settle()
    assert len(server.trips) == LANES
    server.gate.set()
    assert await asyncio.gather(*early) == [[("E", n)] for n in range(LANES)]
    assert await asyncio.gather(*late) == [[("L", n), ("M", n)] for n in range(20)]
    assert len(server.trips) == LANES + 1


async def test_who_asks_again_when_all_lanes_end_at_once_is_sent() -> None:
    server = Server()
    server.gate.clear()
    batches = Batches(server, 1.0)

    async def twice() -> list[Reply]:
        await batches.submit([("A",)])
        return await batches.submit([("B",)])

    first = asyncio.create_task(twice())
    await settle()
    others = await occupy(batches)
    server.gate.set()  # all lanes are answered in one round of the loop, and the first caller goes on before a callback of theirs
    async with asyncio.timeout(30):
        assert await first == [("B",)]
    await asyncio.gather(*others)


async def test_a_batch_is_bounded_in_commands_and_in_bytes() -> None:
    server = Server()
    batches = Batches(server, 1.0)
    await asyncio.gather(*(batches.submit([("A", n)]) for n in range(BATCH_COMMANDS + 10)))
    assert max(map(len, server.trips)) == BATCH_COMMANDS
    server.trips.clear()
    big = b"x" * (BATCH_BYTES // 2 + 1)
    await asyncio.gather(*(batches.submit([("A", big)]) for _ in range(8)))
    assert max(map(len, server.trips)) == 2


async def test_a_refused_command_fails_its_own_caller_only() -> None:
    batches = Batches(Server(), 1.0)
    good, bad = batches.submit([("A",)]), batches.submit([("B",), ("BAD",)])
    results = await asyncio.gather(good, bad, return_exceptions=True)
    assert results[0] == [("A",)] and isinstance(results[1], ResponseError)


@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), RuntimeError("the handler is closed")], ids=["own", "uvloop's"]
)
async def test_a_broken_round_trip_fails_those_on_it_and_the_next_one_works(error: Exception) -> None:
    server = Server()
    server.broken = error
    batches = Batches(server, 1.0)
    async with asyncio.timeout(30):
        with pytest.raises(type(error)):
            await batches.submit([("A",)])
    server.broken = None
    assert await batches.submit([("B",)]) == [("B",)]


class Odd(Exception):
    """Can't be copied as exceptions are: its `args` are not what made it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")


@pytest.mark.parametrize("error", [ConnectionError("gone"), Odd(1, "gone")], ids=["usual", "not copyable"])
async def test_each_who_waits_is_told_by_an_error_of_its_own(error: Exception) -> None:
    server = Server()
    server.broken = error
    batches = Batches(server, 1.0)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*(batches.submit([("A", n)]) for n in range(5)), return_exceptions=True)
    assert {(type(result), str(result)) for result in results} == {(type(error), str(error))}
    if isinstance(error, ConnectionError):
        assert len({id(result) for result in results} - {id(error)}) == 5
        frames = {
            len(traceback.extract_tb(result.__traceback__)) for result in results if isinstance(result, Exception)
        }
        assert len(frames) == 1


async def test_a_server_that_never_answers_is_given_up_in_time_also_by_those_who_wait_for_a_lane() -> None:
    server = Server()
    server.gate.clear()
    batches = Batches(server, 0.02)
    results = await asyncio.gather(*(batches.submit([("A", n)]) for n in range(LANES + 3)), return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)


async def test_a_cancelled_caller_takes_nobody_along() -> None:
    server = Server()
    server.gate.clear()
    batches = Batches(server, 1.0)
    first = await occupy(batches)
    cancelled, kept = (asyncio.create_task(batches.submit([(word,)])) for word in ("C", "K"))
    await settle()
    cancelled.cancel()
    first[0].cancel()
    server.gate.set()
    assert await kept == [("K",)]
    assert await first[1] == [("E", 1)]
    assert server.trips == [[("E", 0)], [("E", 1)], [("K",)]]


async def test_closing_tells_whoever_still_waits() -> None:
    server = Server()
    server.gate.clear()
    batches = Batches(server, 1.0)
    tasks = [asyncio.create_task(batches.submit([("A", n)])) for n in range(LANES + 2)]
    await settle()
    await batches.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
