"""A trial's rates: what is let in, when a refused one may come back, and that nothing is kept of those at rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import TooManyRequests
from steno_proxy.auth.rate_limit import (
    MOST_REFUSED,
    MOST_TRIALS,
    REFUSED_S,
    SWEEP_AT,
    RateLimiter,
    RefusedRequests,
    body_digest,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_rates_nothing_is_counted() -> None:
    rates = RateLimiter()
    for _ in range(1000):
        rates.enter("t")
    rates.leave("t")
    assert len(rates) == 0


def test_a_burst_then_the_rate_and_retry_after_is_when_it_is_let_in() -> None:
    clock = Clock()
    rates = RateLimiter(per_s=2.0, burst=3, clock=clock)
    for _ in range(3):
        rates.enter("t")
    for _ in range(5):  # who is refused does not push its own time away
        with pytest.raises(TooManyRequests, match=r"2 requests a second \(trial_requests_per_s\)") as refused:
            rates.enter("t")
        assert refused.value.retry_after_s == pytest.approx(0.5)
    rates.enter("other")
    clock.now += refused.value.retry_after_s
    rates.enter("t")
    with pytest.raises(TooManyRequests):
        rates.enter("t")
    clock.now += 1000.0
    for _ in range(3):
        rates.enter("t")
    with pytest.raises(TooManyRequests):
        rates.enter("t")


def test_so_many_at_once_and_a_place_that_is_left_is_free() -> None:
    rates = RateLimiter(streams=2, clock=Clock())
    rates.enter("t")
    rates.enter("t")
    with pytest.raises(TooManyRequests, match=r"2 requests in flight, the maximum \(trial_streams\)") as refused:
        rates.enter("t")
    assert refused.value.retry_after_s is not None
    rates.enter("other")
    rates.leave("t")
    rates.enter("t")


def test_a_refusal_for_the_streams_costs_nothing_of_the_rate() -> None:
    clock = Clock()
    rates = RateLimiter(per_s=1.0, burst=2, streams=1, clock=clock)
    rates.enter("t")
    for _ in range(10):
        with pytest.raises(TooManyRequests, match="in flight"):
            rates.enter("t")
    rates.leave("t")
    rates.enter("t")


def test_memory_follows_those_at_work() -> None:
    clock = Clock()
    rates = RateLimiter(per_s=1.0, burst=1, streams=5, clock=clock)
    rates.enter("stays")
    for number in range(50 * SWEEP_AT):
        clock.now += 0.01
        rates.enter(f"t{number}")
        rates.leave(f"t{number}")
    assert len(rates) <= SWEEP_AT
    rates.leave("stays")  # still there


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.integers(1, 5))
def test_never_more_than_the_burst_and_the_rate_in_any_stretch(gaps: list[float], burst: int) -> None:
    clock, let_in = Clock(), []
    rates = RateLimiter(per_s=1.0, burst=burst, clock=clock)
    for gap in gaps:
        clock.now += gap
        try:
            rates.enter("t")
        except TooManyRequests:
            continue
        let_in.append(clock.now)
    for first, start in enumerate(let_in):
        for count, end in enumerate(let_in[first:], 1):
            assert count <= burst + (end - start) + 1e-6


def test_a_refused_request_is_remembered_for_one_retry_and_for_its_time() -> None:
    clock = Clock()
    refused = RefusedRequests(clock)
    for body in (b"a", b"a", b"b"):
        refused.note("t", body_digest(body).digest())
    assert not refused.take("other", b"a") and not refused.take("t", b"c")
    assert [refused.take("t", b"a") for _ in range(3)] == [True, True, False]
    clock.now += REFUSED_S
    assert not refused.take("t", b"b") and not refused.take("t", b"b")


def test_what_is_remembered_of_refused_requests_is_bounded() -> None:
    refused = RefusedRequests(Clock())
    for number in range(MOST_REFUSED + 10):
        refused.note("t", body_digest(b"%d" % number).digest())
    assert not refused.has_room("t") and refused.has_room("u")
    assert refused.take("t", b"%d" % (MOST_REFUSED + 9)) and not refused.take("t", b"0")
    for number in range(MOST_TRIALS):
        refused.note(f"t{number}", body_digest(b"x").digest())
    assert not refused.take("t", b"20") and refused.take(f"t{MOST_TRIALS - 1}", b"x")


def test_refusals_that_nobody_asked_for_again_make_room_after_their_time() -> None:
    clock = Clock()
    refused = RefusedRequests(clock)
    for number in range(MOST_REFUSED):
        refused.note("t", body_digest(b"%d" % number).digest())
    clock.now += REFUSED_S - 1
    assert not refused.has_room("t")
    clock.now += 1
    assert refused.has_room("t") and not refused.take("t", b"0")
    refused.note("t", body_digest(b"new").digest())
    assert refused.take("t", b"new")
