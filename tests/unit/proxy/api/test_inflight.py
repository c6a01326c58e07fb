"""Bytes in flight: what waits, what can't, and that all of it is given back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import BodyTooLarge, TooManyRequests
from steno_proxy.api.agent_http import BodyReader
from steno_proxy.api.agents.generation import GenerationEndpoint
from steno_proxy.api.bodies_in_flight import FREE_BYTES, BodiesInFlight
from steno_proxy.auth.rate_limit import RateLimiter
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.pace import Pace

MB = 2**20


def test_a_trial_waits_for_its_own_and_nobody_else_does() -> None:
    inflight = BodiesInFlight(100 * MB, 30 * MB)
    first, second, other = inflight.hold("a"), inflight.hold("a"), inflight.hold("b")
    first.grow(20 * MB)
    with pytest.raises(TooManyRequests, match=f"trial_inflight_bytes is {30 * MB}") as refused:
        second.grow(20 * MB)
    assert refused.value.retry_after_s
    other.grow(20 * MB)
    first.close()
    first.close()  # once
    second.grow(20 * MB)
    assert inflight.bytes == 40 * MB and inflight.of_trial("a") == 20 * MB


def test_what_no_waiting_helps_is_413() -> None:
    with pytest.raises(BodyTooLarge, match="trial_inflight_bytes"):
        BodiesInFlight(100 * MB, 30 * MB).hold("a").grow(31 * MB)
    with pytest.raises(BodyTooLarge, match="max_inflight_bytes"):
        BodiesInFlight(20 * MB, 30 * MB).hold("a").grow(21 * MB)


def test_large_ones_of_many_trials_keep_no_small_one_out() -> None:
    inflight = BodiesInFlight(100 * MB, 30 * MB)
    for name in "abcd":
        inflight.hold(name).grow(25 * MB)
    with pytest.raises(TooManyRequests, match="max_inflight_bytes"):
        inflight.hold("e").grow(MB)
    inflight.hold("e").grow(FREE_BYTES)


def test_a_body_of_no_declared_length_is_counted_as_it_comes() -> None:
    freed: list[int] = []
    inflight = BodiesInFlight(100 * MB, 30 * MB, freed.append)
    hold = inflight.hold("a")
    for size in range(0, 30 * MB, MB):
        hold.grow(size)
    assert inflight.bytes == 29 * MB
    with pytest.raises(BodyTooLarge):
        hold.grow(31 * MB)
    hold.close()
    assert (inflight.bytes, inflight.of_trial("a"), freed) == (0, 0, [29 * MB])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40 * MB), st.booleans()), max_size=40))
def test_the_bounds_hold_and_everything_comes_back(steps: list[tuple[str, int, bool]]) -> None:
    inflight, holds = BodiesInFlight(100 * MB, 50 * MB), []
    for name, size, close in steps:
        if close and holds:
            holds.pop().close()
        hold = inflight.hold(name)
        holds.append(hold)
        with contextlib.suppress(TooManyRequests, BodyTooLarge):
            hold.grow(size)
        assert inflight.bytes <= 100 * MB and all(inflight.of_trial(name) <= 50 * MB for name in "abc")
    for hold in holds:
        hold.close()
    assert inflight.bytes == 0 and not any(inflight.of_trial(name) for name in "abc")


class Chunked:
    """A request of the trial "a" whose body has no declared length, while others of the trial leave room for 2 MB."""

    def __init__(self, *parts: tuple[bytes, bool], timeout_s: float = 60.0) -> None:
        """parts: each with whether more follow. After them nothing comes."""
        inflight = BodiesInFlight(100 * MB, 30 * MB)
        inflight.hold("a").grow(28 * MB)
        bodies = BodyReader(max_bytes=8 * MB, timeout_s=timeout_s, max_nodes=0, inflight=inflight, pace=Pace())
        self.rates = RateLimiter()
        self._endpoint = GenerationEndpoint(
            ChatDialect(), MagicMock(), MagicMock(), keepalive_s=1.0, bodies=bodies, rates=self.rates, note_writer=MagicMock()
        )  # fmt: skip
        self._parts = iter(parts)

    async def status(self) -> int:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            for part, more in self._parts:
                return {"type": "http.request", "body": part, "more_body": more}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(10):
            await self._endpoint({"path_params": {"trial_id": "a"}, "headers": []}, receive, send)
        found: int = sent[0]["status"]
        return found


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1), (3, 1, 1), (1, 1, 1, 1)])
async def test_a_chunked_body_without_room_is_refused_at_once_and_its_retry_is_known(sizes: tuple[int, ...]) -> None:
    parts = [b"%d" % number * size * MB for number, size in enumerate(sizes)]
    asked = Chunked(*((part, number < len(parts) - 1) for number, part in enumerate(parts)))
    assert await asked.status() == 429
    is_noted = asked.rates.refused.take("a", b"".join(parts))
    assert is_noted


async def test_what_is_left_of_a_refused_body_is_bounded_too() -> None:
    part = b"0" * (3 * MB)
    for asked in (Chunked((part, True), timeout_s=0.1), Chunked((part, True), (part, True), (part, True))):
        assert await asked.status() == 429
        is_noted = asked.rates.refused.take("a", part)
        assert not is_noted
