"""What a launcher does while the proxy is away, by a played clock."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import httpx
import pytest

from steno.contracts.errors import ArchiveUnreadable, Forbidden, ProtocolError, StoreFull, Unreachable
from steno.contracts.rest import Completion, GroupSpec
from steno_rollouts.calls.patience import PatientClient
from steno_rollouts.calls.posts import to_its_end

SESSION = {"trial_id": "g.0", "created_at": 1.0, "updated_at": 2.0, "status": "completed", "reward": 1.0}


class Away:
    """A proxy that answers so until `back_s`, and then with the session. asked: when it was, by the played clock."""

    def __init__(self, back_s: float, answer: Callable[[], httpx.Response], patience_s: float = math.inf) -> None:
        self.now = 0.0
        self.asked: list[float] = []
        self._back_s, self._answer = back_s, answer
        self.client = PatientClient(
            "http://proxy",
            transport=httpx.MockTransport(self._handle),
            clock=lambda: self.now,
            sleep=self._sleep,
            patience_s=patience_s,
        )

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(self.now)
        return self._answer() if self.now < self._back_s else httpx.Response(200, json=SESSION)


def unreachable() -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def refused(status: int, code: str, message: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(
        status, json={"error": {"code": code, "message": message}}, headers={"retry-after": "1"}
    )


def between(status: int) -> Callable[[], httpx.Response]:
    """A load balancer's page, where the proxy behind it is away."""
    return lambda: httpx.Response(status, text="<html>")


@pytest.mark.parametrize(
    "answer",
    [unreachable, between(404), between(502), between(503), refused(503, "store_unavailable", "the store is away")],
)
async def test_a_trials_end_is_posted_once_the_proxy_is_back_and_it_is_said_each_minute(
    answer: Callable[[], httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Away(600.0, answer)
    with caplog.at_level(logging.WARNING):
        session = await proxy.client.complete("g.0", Completion(reward=1.0))
    assert session.reward == 1.0 and 600.0 <= proxy.now <= 610.0
    said = [record.getMessage() for record in caplog.records if record.name == "steno_rollouts.calls.patience"]
    assert 9 <= len(said) <= 12 and said[-1].startswith("the proxy answers again, after 60")
    assert all("asking the proxy again (for " in line for line in said[:-1])


async def test_who_may_be_cut_off_itself_waits_for_a_bounded_time() -> None:
    proxy = Away(float("inf"), unreachable, patience_s=600.0)
    with pytest.raises(Unreachable):
        await proxy.client.session("g.0")
    assert 600.0 <= proxy.now <= 610.0
    assert (await Away(590.0, unreachable, patience_s=600.0).client.session("g.0")).reward == 1.0


async def test_a_short_pause_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await Away(2.0, unreachable).client.session("g.0")
    assert caplog.text == ""


async def test_rollouts_that_are_told_to_stop_ask_for_half_a_minute_more() -> None:
    proxy = Away(float("inf"), unreachable)

    async def post() -> None:
        await proxy.client.complete("g.0", Completion(reward=1.0))

    posting = asyncio.create_task(to_its_end(post()))
    while proxy.now < 100.0:
        await asyncio.sleep(0)
    posting.cancel()
    with pytest.raises(Unreachable):
        await posting
    assert proxy.now < 110.0, "it has been asked long enough"
    proxy = Away(float("inf"), unreachable)
    with pytest.raises(Unreachable):
        await to_its_end(to_its_end(post()), stopping=True)
    assert 30.0 < proxy.now < 40.0


async def test_where_packets_vanish_that_is_half_a_minute_too_and_not_as_many_attempts() -> None:
    def silence() -> httpx.Response:
        proxy.now += 30.0
        raise httpx.ReadTimeout("")

    proxy = Away(float("inf"), silence)

    async def post() -> None:
        await proxy.client.complete("g.0", Completion(reward=1.0))

    with pytest.raises(Unreachable):
        await to_its_end(post(), stopping=True)
    assert len(proxy.asked) == 2 and proxy.now < 65.0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refused(503, "archive_unreadable", "g.jsonl: no such file"), ArchiveUnreadable),
        (lambda: httpx.Response(200, text="<html>"), ProtocolError),
    ],
)
async def test_what_waiting_may_not_mend_is_tried_for_half_a_minute(
    answer: Callable[[], httpx.Response], error: type[Exception]
) -> None:
    proxy = Away(float("inf"), answer)
    async with asyncio.timeout(60):
        with pytest.raises(error):
            await proxy.client.session("g.0")
    assert 30.0 < proxy.now < 40.0


@pytest.mark.parametrize(
    ("answer", "error"),
    [(refused(403, "forbidden", "this key"), Forbidden), (refused(503, "store_full", "Redis uses 85%"), StoreFull)],
)
async def test_what_waiting_does_not_mend_or_others_wait_for_is_raised_at_once(
    answer: Callable[[], httpx.Response], error: type[Exception]
) -> None:
    proxy = Away(600.0, answer)
    with pytest.raises(error):
        await proxy.client.create_group(GroupSpec(group_id="g", size=1))
    assert proxy.asked == [0.0]
