"""Environments of verifiers' are shared by trials, and left by whoever entered them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno_rollouts.trials.verifiers import serving
from steno_rollouts.trials.verifiers.serving import Environments
from tests.support.waiting import until


class Environment:
    """As verifiers' `Env`, as far as it is served."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.asked, self.left = fails, False, False
        self.gate: asyncio.Event | None = None
        self.entered: asyncio.Task[Any] | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.asked = True
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.fails:
            raise OSError("no port")
        self.entered = asyncio.current_task()
        try:
            yield
        finally:
            assert asyncio.current_task() is self.entered, "its tool servers are left where they were entered"
            self.left = True


class Made:
    def __init__(self, *, failing: int = 0, gate: asyncio.Event | None = None) -> None:
        self.environments: list[Environment] = []
        self._failing, self._gate = failing, gate

    def __call__(self) -> Environment:
        made = Environment(len(self.environments) < self._failing)
        made.gate = self._gate
        self.environments.append(made)
        return made


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LINGER_S", 0.0)


async def test_trials_share_one_that_stays_for_a_while_after_the_last() -> None:
    made = Made()
    lent = Environments(made)
    async with lent.lent() as first, lent.lent() as second:
        assert first is second and first.entered is not None
    async with lent.lent() as third:
        assert third is first and not first.left
    assert len(made.environments) == 1 and not first.left


@pytest.mark.usefixtures("hasty")
async def test_one_without_a_trial_ends_and_the_next_trial_gets_another() -> None:
    made = Made()
    lent = Environments(made)
    async with lent.lent() as first:
        pass
    await until(lambda: first.left)
    async with lent.lent() as second:
        assert second is not first


async def test_one_that_has_served_many_ends_with_its_last_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_TRIALS", 2)
    made = Made()
    lent = Environments(made)
    async with lent.lent() as first:
        async with lent.lent() as second, lent.lent() as third:
            assert first is second and third is not first
        await asyncio.sleep(0.02)
        assert not first.left, "a trial runs in it"
    await until(lambda: first.left)
    assert not third.left, "it takes more"


async def test_one_that_can_not_serve_is_an_error_of_its_trials_and_another_is_tried() -> None:
    made = Made(failing=1)
    lent = Environments(made)

    async def trial() -> Environment:
        async with lent.lent() as environment:
            return environment  # type: ignore[no-any-return]

    failed = await asyncio.gather(trial(), trial(), return_exceptions=True)
    assert [str(error) for error in failed] == ["no port", "no port"]
    assert (await trial()).entered is not None and len(made.environments) == 2


async def test_a_trial_that_is_cancelled_while_it_begins_takes_nobody_with_it() -> None:
    gate = asyncio.Event()
    made = Made(gate=gate)
    lent = Environments(made)

    async def trial() -> Environment:
        async with lent.lent() as environment:
            return environment  # type: ignore[no-any-return]

    cancelled, other = asyncio.create_task(trial()), asyncio.create_task(trial())
    await until(lambda: made.environments and made.environments[0].asked)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    gate.set()
    assert (await other).entered is not None and len(made.environments) == 1
