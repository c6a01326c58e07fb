"""A collector that is closed, or of which one round fails, while other threads use it. No proxy is there."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import BadRequest, Forbidden
from steno_adapters import Collector
from steno_rollouts.groups.plan import Planned

NOWHERE = "http://127.0.0.1:1"
PATIENCE_S = 60.0


class Told(threading.Thread):
    """A thread in `collect`, of one task. By `n` the rounds below know each other."""

    def __init__(self, collector: Collector, n: int) -> None:
        super().__init__(daemon=True)
        self._collector, self._n = collector, n
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._collector.collect([{"task_id": "t"}], self._n)
        except BaseException as error:
            self.error = error

    def over(self) -> BaseException | None:
        """What it was told."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        return self.error


def collector_of(run: Callable[[int, Iterable[Planned]], Awaitable[None]]) -> Collector:
    """Args: run: in place of `Rollouts.run`, with the `n` of `collect`."""
    collector: Any = Collector(NOWHERE, "ends", agent=lambda call: 1.0)
    collector._rollouts = lambda client, executor, n, admission, again: SimpleNamespace(
        run=lambda planned: run(n, planned)
    )
    collector._client.lease = lambda request: []
    return collector  # type: ignore[no-any-return]


def test_a_thread_that_collects_is_told_that_the_collector_was_closed() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def run(n: int, planned: Iterable[Planned]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it ends its trials
            cancelled.set()

    with collector_of(run) as collector:
        prefetch = Told(collector, 2)
        assert begun.wait(PATIENCE_S)
    assert cancelled.is_set(), "it is closed once they have ended"
    assert isinstance(prefetch.over(), CancelledError)


def test_a_round_that_fails_is_told_while_another_one_runs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def run(n: int, planned: Iterable[Planned]) -> None:
        if n == 2:
            begun.set()
            await asyncio.get_running_loop().run_in_executor(None, go_on.wait)
        raise Forbidden(f"round of {n}")

    with collector_of(run) as collector:
        second = Told(collector, 2)
        assert begun.wait(PATIENCE_S)
        first = Told(collector, 1)
        try:
            assert str(first.over()) == "round of 1"
            assert second.is_alive()
        finally:
            go_on.set()
        assert str(second.over()) == "round of 2"


def test_a_round_that_fails_is_told_while_endless_ones_run_in_the_background() -> None:
    async def run(n: int, planned: Iterable[Planned]) -> None:
        if n == 1:
            raise Forbidden("round of 1")
        for _ in planned:
            await asyncio.sleep(0.01)

    with collector_of(run) as collector:
        endless = collector.start(itertools.repeat({"task_id": "t"}), 2, groups_per_step=1, max_staleness_steps=1)
        assert str(Told(collector, 1).over()) == "round of 1"
        assert not endless.done()
    assert endless.cancelled()


def test_a_collector_that_is_closed_runs_nothing() -> None:
    async def run(n: int, planned: Iterable[Planned]) -> None:
        list(planned)

    collector = collector_of(run)
    assert collector.collect([{"task_id": "t"}], 2) == []
    collector.close()
    collector.close()
    refused = Told(collector, 2).over()
    assert isinstance(refused, BadRequest) and refused.message == "collector: it is closed: make another one"
    with pytest.raises(BadRequest, match="it is closed"):
        collector.start([], 2, groups_per_step=1, max_staleness_steps=1)


def test_a_thread_that_leases_is_told_that_the_collector_was_closed() -> None:
    """Its client is closed under it, and says so in words of its own."""
    asks, closed = threading.Event(), threading.Event()

    async def run(n: int, planned: Iterable[Planned]) -> None:
        list(planned)

    def lease(request: object) -> list[Any]:
        asks.set()
        assert closed.wait(PATIENCE_S)
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    with collector_of(run) as collector:
        collector._client.lease = lease  # type: ignore[method-assign, assignment]
        prefetch = Told(collector, 2)
        assert asks.wait(PATIENCE_S)
    closed.set()
    assert isinstance(prefetch.over(), CancelledError)
    with pytest.raises(BadRequest, match="it is closed"):
        collector.lease()


def test_what_is_cancelled_before_it_has_begun_ends() -> None:
    """Else the collector would wait for it when it is closed."""
    go_on = threading.Event()

    async def run(n: int, planned: Iterable[Planned]) -> None:
        list(planned)

    with collector_of(run) as collector:
        collector.collect([], 1)
        assert collector._loop is not None
        collector._loop.call_soon_threadsafe(go_on.wait)
        collector.start([], 2, groups_per_step=1, max_staleness_steps=1).cancel()
        [rolling] = collector._rolling
        go_on.set()
        assert rolling.ended.wait(PATIENCE_S)
