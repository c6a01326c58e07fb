"""Redis's time, as a replica knows it between two answers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from steno.contracts.errors import StoreUnavailable
from steno_proxy.store.redis.link.clock import RedisClock, _steady
from steno_proxy.store.redis.link.redis_link import RedisLink

NOON = 1_800_000_000.0


class Machine:
    """A replica's machine: `steady` counts its seconds. The Redis that it asks is `ahead_s` ahead of Noon plus these; an answer
    takes `there_s` there and `back_s` back."""

    def __init__(self) -> None:
        self.steady, self.ahead_s, self.there_s, self.back_s = 5.0, 0.0, 0.0, 0.0
        self.away = False
        self.client = self
        self.clock = RedisClock(cast(RedisLink, self), lambda: self.steady)

    def time(self) -> tuple[int, int]:
        self.steady += self.there_s
        now = NOON + self.steady + self.ahead_s
        self.steady += self.back_s
        return int(now), round(now % 1 * 1e6)

    async def call(self, answer: Any) -> Any:
        if self.away:
            raise StoreUnavailable("it is away")
        return answer

    def off_s(self) -> float:
        """How far the replica's idea of Redis's time is ahead of Redis's clock."""
        return self.clock.now() - (NOON + self.steady + self.ahead_s)


async def test_it_goes_on_by_itself_between_two_answers() -> None:
    machine = Machine()
    assert await machine.clock.ask() == NOON + 5.0
    machine.steady += 60.0
    assert machine.clock.now() == NOON + 65.0


async def test_before_the_first_answer_it_says_what_this_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOON + 7.0)
    machine = Machine()
    machine.away = True
    with pytest.raises(StoreUnavailable):
        await machine.clock.ask()
    machine.steady += 1.0
    assert machine.clock.now() == NOON + 8.0


async def test_an_answer_that_it_agrees_with_changes_nothing_however_long_it_took() -> None:
    machine = Machine()
    await machine.clock.ask()
    machine.there_s, machine.back_s = 0.0, 3.0
    assert await machine.clock.ask() == NOON + 5.0
    assert machine.off_s() == 0.0
    machine.there_s, machine.back_s = 3.0, 0.0
    await machine.clock.ask()
    assert machine.off_s() == 0.0


@pytest.mark.parametrize("by_s", [-600.0, 600.0, 0.5])
async def test_it_follows_a_clock_that_was_set_or_another_redis_with_another_clock(by_s: float) -> None:
    machine = Machine()
    await machine.clock.ask()
    machine.ahead_s, machine.there_s, machine.back_s = by_s, 0.01, 0.03
    await machine.clock.ask()
    assert abs(machine.off_s()) <= 0.02, "half of the time that the answer took"


async def test_what_was_stamped_before_a_clock_was_set_forward_is_as_old_as_it_is() -> None:
    machine = Machine()
    await machine.clock.ask()
    stamped, since = machine.clock.now(), machine.steady
    machine.ahead_s = 3600.0
    await machine.clock.ask()
    assert machine.clock.now() - stamped == 3600.0
    assert machine.clock.earliest() - stamped == machine.steady - since
    machine.ahead_s = -60.0
    await machine.clock.ask()
    assert machine.clock.earliest() == machine.clock.now(), "set back: it is older than it seems"


async def test_two_clocks_that_drift_apart_are_none_that_was_set() -> None:
    machine = Machine()
    for _ in range(100):
        await machine.clock.ask()
        machine.ahead_s += 0.5
    await machine.clock.ask()
    assert machine.clock.earliest() == pytest.approx(machine.clock.now())
    machine.ahead_s += 3600.0
    await machine.clock.ask()
    machine.ahead_s += 0.5
    await machine.clock.ask()
    assert machine.clock.now() - machine.clock.earliest() == pytest.approx(3600.0)


async def test_a_redis_that_is_ahead_of_this_machine_all_the_time_is_no_clock_that_was_set() -> None:
    machine = Machine()
    machine.ahead_s = 3600.0
    await machine.clock.ask()
    assert machine.clock.earliest() == machine.clock.now()


async def test_the_next_answer_that_comes_soon_mends_what_a_slow_first_one_left() -> None:
    machine = Machine()
    machine.back_s = 4.0
    await machine.clock.ask()
    assert machine.off_s() == pytest.approx(-2.0)
    machine.back_s = 0.0
    await machine.clock.ask()
    assert machine.off_s() == 0.0


def test_no_change_of_this_machines_clock_moves_what_it_goes_on_by(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _steady()
    monkeypatch.setattr("time.time", lambda: NOON)
    assert before <= _steady() < before + 60
