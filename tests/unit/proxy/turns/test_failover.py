"""What replaces a worker that was lost or gave up, of a hub that a test plays (I9): whom it avoids, and what is counted."""

from __future__ import annotations

from typing import Any, cast

import pytest

from steno.contracts.errors import EngineFailed, StenoError, TooManyRequests, WorkerLost
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta
from steno_proxy import metrics
from steno_proxy.turns.failover import MAX_ATTEMPTS, go_on
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order, WorkersAway
from steno_proxy.workers.relay_settings import RelaySettings
from steno_proxy.workers.stream import Stream
from tests.support.records.choices import Said, stream

FULL = TooManyRequests("full", retry_after_s=0.0)


class Workers:
    """A hub of workers of these names, each the process and the channel of its streams. asked: who got an order, in turn."""

    def __init__(self, *names: str, queue_s: float = 60.0) -> None:
        self.names, self.asked, self.settings = names, list[str](), RelaySettings(queue_s=queue_s)

    def open(self, order: Order) -> Stream:
        able = [name for name in self.names if name not in order.avoid]
        if not able:
            raise WorkersAway("none")
        given = stream()
        given.worker_id = given.process = given.channel = able[0]
        self.asked.append(able[0])
        return given

    async def place(self, order: Order, *, urgent: bool = False) -> Stream:
        return self.open(order)


async def begun(workers: Workers, *, tokens: int) -> Said:
    """A choice at the first worker, of which so many tokens have come."""
    said = await Said.begin()
    said.choice.stream = workers.open(said.choice.order)
    if tokens:
        said.hear(*[Delta(1, ids_to_bytes([7]), floats_to_bytes([-0.5]), "run/1", "x") for _ in range(tokens)])
    return said


async def fails(workers: Workers, said: Said, error: StenoError) -> None:
    await go_on(cast(Hub, cast(Any, workers)), said.choice, said.choice.plan, error, untold=False, at=1000.0)


def lost() -> float:
    return float(metrics.FAILOVERS.labels("no_worker")._value.get())


async def test_engines_that_are_full_are_asked_in_turn_and_none_is_avoided_for_good() -> None:
    workers = Workers("a", "b", "c")
    said = await begun(workers, tokens=2)
    await fails(workers, said, EngineFailed("gone"))
    for _ in range(5):
        await fails(workers, said, FULL)
    assert workers.asked == ["a", "b", "c", "b", "c", "b", "c"]
    assert said.choice.order.avoid == {"a"} and said.choice.order.attempt == 6
    assert [move.error for move in said.choice.facts.moves] == ["engine_failed"]


async def test_what_a_full_engine_sent_away_may_come_back_to_it_once_it_has_begun() -> None:
    workers = Workers("a", "b")
    said = await begun(workers, tokens=0)
    await fails(workers, said, FULL)
    said.hear(Delta(1, ids_to_bytes([7]), floats_to_bytes([-0.5]), "run/1", "x"))
    await fails(workers, said, EngineFailed("gone"))
    assert workers.asked == ["a", "b", "a"]


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_turn_that_fails_too_often_is_counted_as_lost_and_logged(
    tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    workers, before = Workers(*"abcdefgh"), lost()
    said = await begun(workers, tokens=tokens)
    for _ in range(MAX_ATTEMPTS - 1):
        await fails(workers, said, WorkerLost("gone"))
    assert lost() == before
    with pytest.raises(WorkerLost):
        await fails(workers, said, WorkerLost("gone"))
    assert lost() == before + 1 and f"after worker_lost: {MAX_ATTEMPTS} attempts have failed" in caplog.text


async def test_a_request_that_full_engines_alone_send_away_is_not_counted() -> None:
    workers, before = Workers(*"abcdefgh"), lost()
    said = await begun(workers, tokens=0)
    with pytest.raises(TooManyRequests):
        for _ in range(MAX_ATTEMPTS):
            await fails(workers, said, FULL)
    assert (lost(), len(workers.asked)) == (before, MAX_ATTEMPTS)


async def test_losses_count_and_refusals_between_them_do_not() -> None:
    workers, before = Workers(*"abcdefgh"), lost()
    said = await begun(workers, tokens=1)
    for _ in range(MAX_ATTEMPTS - 1):
        await fails(workers, said, WorkerLost("gone"))
        await fails(workers, said, FULL)
    with pytest.raises(WorkerLost):
        await fails(workers, said, WorkerLost("gone"))
    assert (lost(), said.choice.order.attempt) == (before + 1, 2 * (MAX_ATTEMPTS - 1))


async def test_where_no_time_is_left_full_engines_are_asked_once_each() -> None:
    workers, before = Workers("a", "b", "c", queue_s=0.0), lost()
    said = await begun(workers, tokens=1)
    await fails(workers, said, EngineFailed("gone"))
    await fails(workers, said, FULL)
    with pytest.raises(TooManyRequests) as told:
        await fails(workers, said, FULL)
    assert told.value is FULL and lost() == before + 1
    assert workers.asked == ["a", "b", "c"]
