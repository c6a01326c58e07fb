"""What a trainer holds: groups leased ahead, kept, read, given back. The proxy is played at its client's seam, for losses at
any moment."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.errors import Conflict, Forbidden, Gone, Superseded, Unreachable
from steno.contracts.records import Timings, TokenSpan, Turn
from steno.contracts.rest import UnreadableTurn
from steno.contracts.runs.leases import MOST_LEASES, Lease, LeaseRequest
from steno_trainer.data import lease_feed as feed_module
from steno_trainer.data.lease_feed import EXTENDED_AT_ONCE, LeaseFeed
from steno_trainer.data.ledger import Reason
from tests.support.waiting import until
from tests.unit.trainer.leasing import FakeProxy, lease


def feed_of(proxy: FakeProxy, **options: object) -> LeaseFeed:
    return LeaseFeed(proxy, run_id="r", consumer="t", ahead=2, **options)  # type: ignore[arg-type]


async def test_groups_come_in_their_order_and_no_more_are_held_than_asked() -> None:
    proxy = FakeProxy([lease(name, f"{name}.0") for name in "abcd"])
    async with feed_of(proxy) as feed:
        await until(lambda: feed.waiting == 2)
        assert len(proxy.ready) == 2
        assert [found.group_id for found in await feed.take(2)] == ["a", "b"]
        assert [found.group_id for found in await feed.take(2)] == ["c", "d"]


async def test_a_step_of_more_groups_than_one_request_may_lease_takes_several() -> None:
    proxy = FakeProxy([lease(f"g{i}", f"g{i}.0") for i in range(MOST_LEASES + 4)])
    async with LeaseFeed(proxy, run_id="r", consumer="t", ahead=MOST_LEASES + 4) as feed:  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            assert len(await feed.take(MOST_LEASES + 4)) == MOST_LEASES + 4
    assert max(len(found) for found in proxy.granted.values()) == MOST_LEASES, "what the contract allows"


async def test_leases_are_extended_together_since_each_takes_its_time() -> None:
    """600 held groups, at 1 s each, would take as long as a lease lasts."""
    proxy = FakeProxy(hold={"extend": asyncio.Event()})
    feed = feed_of(proxy, ttl_s=0.03)
    feed._held.update({f"g{i}": lease(f"g{i}", f"g{i}.0") for i in range(EXTENDED_AT_ONCE + 1)})
    keeping = asyncio.create_task(feed._keep())
    await until(lambda: proxy.calls["extend"] == EXTENDED_AT_ONCE)
    proxy.hold.pop("extend").set()
    await until(lambda: len(set(proxy.extended)) == EXTENDED_AT_ONCE + 1)
    keeping.cancel()


async def test_what_is_held_at_the_end_is_given_back_and_what_was_acknowledged_is_not() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")])
    async with feed_of(proxy) as feed:
        await feed.take(1)
        await feed.acknowledge(["a"])
        await until(lambda: feed.waiting == 1)
    assert proxy.acknowledged == ["lease-a"]
    assert proxy.released == ["lease-b"]


async def test_what_was_leased_by_a_request_whose_answer_did_not_come_is_given_back() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")], answer=asyncio.Event())
    async with feed_of(proxy):
        await until(lambda: bool(proxy.granted))
    assert proxy.released == ["lease-a", "lease-b"]


async def test_what_came_in_one_answer_with_a_group_that_is_read_is_given_back() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")], hold={"samples": asyncio.Event()})
    async with feed_of(proxy):
        await until(lambda: proxy.calls["samples"] == 1)
    assert proxy.released == ["lease-a", "lease-b"]


async def test_a_request_that_failed_is_sent_again_as_it_was() -> None:
    asked: list[str | None] = []

    class Losing(FakeProxy):
        async def lease(self, request: LeaseRequest) -> list[Lease]:
            asked.append(request.request_id)
            found = await super().lease(request)
            if len(asked) == 1:
                raise Unreachable("the answer is lost")
            return found

    proxy = Losing([lease("a", "a.0"), lease("b", "b.0")])
    async with feed_of(proxy) as feed:
        await until(lambda: feed.waiting == 2)
    assert asked[0] == asked[1]
    assert proxy.released == ["lease-a", "lease-b"]


async def test_the_proxy_is_told_what_a_step_has_used() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")])
    async with feed_of(proxy) as feed:
        await feed.take(1)
        await feed.used(["a", "unknown"])
    assert proxy.extended == ["lease-a used"]


async def test_a_group_that_was_trained_before_is_acknowledged_at_sight() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")])
    trained = {"a", "z"}
    async with feed_of(proxy, trained=trained) as feed:
        assert [found.group_id for found in await feed.take(1)] == ["b"]
    assert proxy.acknowledged == ["lease-a"]
    assert trained == {"z"}, "what the proxy is done with need not be remembered"
    assert proxy.calls["samples"] == 1


async def test_the_books_of_a_group_are_those_of_its_lease() -> None:
    proxy = FakeProxy([lease("a", "a.0", "a.1", gone=("a.2",))])
    async with feed_of(proxy) as feed:
        (found,) = await feed.take(1)
    assert len(found.samples) == 2
    account = found.books.accounts()["a/1"]
    assert (account.sampled, account.untrained) == (12, {Reason.DELETED: 4})
    assert proxy.calls["turns"] == 0


async def test_a_trial_deleted_while_its_group_is_read_is_booked_as_deleted() -> None:
    proxy = FakeProxy([lease("a", "a.0", "a.1")], failures={"samples": [Gone("deleted")]})
    async with feed_of(proxy) as feed:
        (found,) = await feed.take(1)
    assert len(found.samples) == 1
    assert found.books.accounts()["a/1"].untrained == {Reason.DELETED: 4}


async def test_tokens_in_no_sample_are_explained_by_the_turns_or_show() -> None:
    superseded = Turn(
        turn_id="1", superseded_by="2", versions=[TokenSpan(version="a/1", start=0, end=3)], completion_ids=bytes(12),
        timings=Timings(queued=0.0),
    )  # fmt: skip
    proxy = FakeProxy([lease("a", "a.0", tokens=7)], turns_of={"a.0": [superseded]})
    async with feed_of(proxy) as feed:
        (found,) = await feed.take(1)
    account = found.books.accounts()["a/1"]
    assert (account.sampled, account.untrained) == (7, {Reason.SUPERSEDED: 3})


async def test_what_can_not_be_read_is_booked_by_its_version_and_the_group_is_taken() -> None:
    turn = Turn(
        turn_id="1", versions=[TokenSpan(version="a/1", start=0, end=3)], completion_ids=bytes(12),
        timings=Timings(queued=0.0),
    )  # fmt: skip
    proxy = FakeProxy(
        [lease("a", "a.0", tokens=7)], turns_of={"a.0": [turn]},
        unreadable_of={"a.0": [UnreadableTurn(turn_id="1", reason="a log-probability is missing", completion_tokens=3)]},
    )  # fmt: skip
    async with feed_of(proxy) as feed:
        (found,) = await feed.take(1)
    account = found.books.accounts()["a/1"]
    assert (account.sampled, account.untrained) == (7, {Reason.UNREADABLE: 3})
    assert len(found.samples) == 1


async def test_a_lost_lease_takes_its_waiting_group_along() -> None:
    proxy = FakeProxy([lease("a", "a.0"), lease("b", "b.0")], failures={"extend": [Conflict("lost")]})
    async with feed_of(proxy, ttl_s=1.0) as feed:
        await until(lambda: proxy.extended)
        assert [found.group_id for found in await feed.take(1)] == ["b"]
        assert feed.held == 1
    assert proxy.released == ["lease-b"]


async def test_a_group_that_is_served_again_while_it_waits_is_taken_once() -> None:
    """Its lease ran out while nobody could reach the proxy, and the next request for groups brings it back."""
    proxy = FakeProxy([lease("a", "a.0")])
    async with feed_of(proxy) as feed:
        await until(lambda: feed.waiting == 1)
        proxy.serve(lease("a", "a.0").model_copy(update={"lease_id": "lease-a-2"}))
        proxy.serve(lease("b", "b.0"))
        assert [found.group_id for found in await feed.take(2)] == ["a", "b"]
        await feed.acknowledge(["a", "b"])
    assert proxy.acknowledged == ["lease-a-2", "lease-b"]


async def test_news_of_an_old_lease_do_not_touch_the_new_one() -> None:
    proxy = FakeProxy([lease("a", "a.0")], hold={"extend": asyncio.Event()}, failures={"extend": [Conflict("lost")]})
    async with feed_of(proxy, ttl_s=1.0) as feed:
        await until(lambda: proxy.calls["extend"] == 1)
        proxy.serve(lease("a", "a.0").model_copy(update={"lease_id": "lease-a-2"}))
        await until(lambda: not proxy.ready)
        proxy.hold.pop("extend").set()
        await until(lambda: "lease-a-2" in proxy.extended)
        assert feed.held == feed.waiting == 1
        assert [found.group_id for found in await feed.take(1)] == ["a"]
        await feed.acknowledge(["a"])
    assert proxy.acknowledged == ["lease-a-2"]


async def test_a_lease_lost_while_its_group_is_read_in_vain_ends_nothing() -> None:
    proxy = FakeProxy(
        [lease("a", "a.0")], hold={"samples": asyncio.Event()},
        failures={"extend": [Conflict("lost")], "samples": [Unreachable("gone")]},
    )  # fmt: skip
    async with feed_of(proxy, ttl_s=1.0) as feed:
        await until(lambda: proxy.calls["samples"] == 1 and feed.held == 0)
        proxy.hold.pop("samples").set()
        proxy.serve(lease("b", "b.0"))
        assert [found.group_id for found in await asyncio.wait_for(feed.take(1), 30.0)] == ["b"]


async def test_groups_that_do_not_count_make_room_at_once_and_come_along() -> None:
    proxy = FakeProxy([lease(name, f"{name}.0") for name in "axb"])
    async with feed_of(proxy, counts=lambda lease: lease.group.group_id in "abc") as feed:
        await until(lambda: proxy.extended == ["lease-x used"] and feed.waiting == 2)
        assert [found.group_id for found in await feed.take(2)] == ["x", "a", "b"]
        proxy.serve(lease("c", "c.0"), lease("z", "z.0"), lease("w", "w.0"))
        assert [found.group_id for found in await feed.take(2)] == ["z", "w"], "they need not wait for a step"
        assert [found.group_id for found in await feed.take(1)] == ["c"]
        await feed.acknowledge("xabcz")
        assert feed.held == 1
    assert proxy.released == ["lease-w"]


async def test_no_more_groups_that_do_not_count_are_held_than_asked() -> None:
    proxy = FakeProxy([lease(name, f"{name}.0") for name in "wxyz"])
    async with feed_of(proxy, counts=lambda lease: False) as feed:
        await until(lambda: feed.held == 2)
        await asyncio.sleep(0.1)
        assert feed.held == len(proxy.ready) == 2


async def test_a_lease_lost_before_its_acknowledgement_leaves_the_group_to_be_known_again() -> None:
    proxy = FakeProxy([lease("a", "a.0")], failures={"acknowledge": [Conflict("lost")]})
    trained: set[str] = set()
    async with feed_of(proxy, trained=trained) as feed:
        await feed.take(1)
        trained.add("a")
        await feed.acknowledge(["a"])
        assert trained == {"a"}
        proxy.serve(lease("a", "a.0"))
        await until(lambda: proxy.acknowledged == ["lease-a"])
    assert trained == set()


async def test_a_group_whose_acknowledgement_redis_forgot_is_acknowledged_again_and_not_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a failover, or from an older backup."""
    proxy = FakeProxy([lease("a", "a.0")])
    trained: set[str] = set()
    async with feed_of(proxy, trained=trained) as feed:
        await feed.take(1)
        trained.add("a")
        await feed.acknowledge(["a"])
        proxy.serve(lease("a", "a.0").model_copy(update={"lease_id": "lease-a-2"}), lease("b", "b.0"))
        assert [found.group_id for found in await feed.take(1)] == ["b"]
    assert proxy.acknowledged == ["lease-a", "lease-a-2"]
    assert proxy.calls["samples"] == 2, "it was read once"
    assert [record.getMessage() for record in caplog.records] == [
        "group a was trained and acknowledged, and the proxy's Redis has forgotten it: acknowledged again"
    ]


async def test_a_group_made_anew_under_the_name_of_one_that_was_acknowledged_is_another_one() -> None:
    """Redis came back empty, or the group was deleted: rollouts that were started again have sampled other tokens."""
    old, new = lease("a", "a.0"), lease("a", "a.0")
    new = new.model_copy(update={"lease_id": "lease-a-2", "group": new.group.model_copy(update={"created_at": 9.0})})
    proxy = FakeProxy([old])
    async with feed_of(proxy) as feed:
        for one in (old, new):
            proxy.serve(*[one] if one is new else [])
            assert [found.lease for found in await feed.take(1)] == [one]
            await feed.acknowledge(["a"])
    assert proxy.acknowledged == ["lease-a", "lease-a-2"]


async def test_no_more_acknowledged_groups_are_remembered_than_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_ACKNOWLEDGED", 2)
    proxy = FakeProxy([lease(name, f"{name}.0") for name in "abc"])
    acknowledged: dict[str, float] = {}
    async with feed_of(proxy, acknowledged=acknowledged) as feed:
        await feed.take(2)
        await feed.acknowledge("ab")
        proxy.serve(lease("a", "a.0"))
        await until(lambda: proxy.acknowledged == ["lease-a", "lease-b", "lease-a"])
        assert [found.group_id for found in await feed.take(1)] == ["c"]
        await feed.acknowledge("c")
    assert list(acknowledged) == ["a", "c"]


@pytest.mark.parametrize("used", [False, True], ids=["while the step runs", "before it is durable"])
async def test_a_group_that_a_step_has_is_neither_trained_twice_nor_acknowledged_early(used: bool) -> None:
    proxy = FakeProxy([lease("a", "a.0")])
    trained: set[str] = set()
    async with feed_of(proxy, trained=trained, ttl_s=1.0) as feed:
        await feed.take(1)
        if used:
            trained.add("a")  # in the state, as after a step; no checkpoint has it
            await feed.used(["a"])
        proxy.failures["extend"] = [Conflict("lost")]
        await until(lambda: feed.held == 0)
        again = lease("a", "a.0").model_copy(update={"lease_id": "lease-a-2"})
        proxy.serve(again)
        await until(lambda: feed.held == 1)
        await until(lambda: proxy.extended[-1:] == ["lease-a-2" + " used" * used])
        assert feed.waiting == 0
        assert proxy.acknowledged == []
        await feed.acknowledge(["a"])
    assert proxy.acknowledged == ["lease-a-2"]


async def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "AGAIN_S", 0.0)
    proxy = FakeProxy(
        [lease("a", "a.0")], failures={"lease": [Unreachable("restarting")], "samples": [Unreachable("gone")]}
    )
    async with feed_of(proxy) as feed:
        await until(lambda: proxy.released == ["lease-a"])  # it could not be read: somebody may be served it again
        proxy.serve(lease("b", "b.0"))
        assert [found.group_id for found in await feed.take(1)] == ["b"]


async def test_that_no_group_comes_is_said_and_not_at_each_poll(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=feed_module.logger.name)
    proxy = FakeProxy([lease("a", "a.0")], in_vain=3)
    async with feed_of(proxy) as feed:
        await feed.take(1)
    assert proxy.calls["lease"] >= 4
    assert [record.getMessage() for record in caplog.records if "no group" in record.getMessage()] == [
        "run r: no group is ready, waiting; `steno rollout` makes them, `steno runs show` says where they are"
    ]


async def test_that_too_few_groups_come_for_a_step_is_said_with_how_many_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where the trainer's groups_per_step is more than rollouts admit."""
    caplog.set_level("INFO", logger=feed_module.logger.name)

    class Scarce(FakeProxy):
        async def lease(self, request: LeaseRequest) -> list[Lease]:
            await asyncio.sleep(0.01)
            return await super().lease(request) if self.ready else []

    async with feed_of(Scarce([lease("a", "a.0")])) as feed:
        await until(lambda: "waiting" in caplog.text)
        assert feed.waiting == 1
    assert [record.getMessage() for record in caplog.records] == [
        "run r: has 1 of the 2 groups of a step (groups_per_step, the same for `steno rollout`), waiting; `steno rollout` "
        "makes them, `steno runs show` says where they are"
    ]


async def test_what_will_not_pass_ends_whoever_waits() -> None:
    proxy = FakeProxy(failures={"lease": [Forbidden("not an admin's key")]})
    async with feed_of(proxy) as feed:
        with pytest.raises(Forbidden, match="not an admin's key"):
            await asyncio.wait_for(feed.take(1), 30.0)


async def test_patience_takes_fewer_groups_but_never_none() -> None:
    proxy = FakeProxy([lease("a", "a.0")])
    async with feed_of(proxy) as feed:
        taken = await feed.take(2, at_least=1, wait_s=0.05)
        assert [found.group_id for found in taken] == ["a"]
        later = asyncio.create_task(feed.take(2, at_least=1, wait_s=0.05))
        await asyncio.sleep(0.2)
        assert not later.done()
        proxy.serve(lease("b", "b.0"))
        assert [found.group_id for found in await later] == ["b"]


@pytest.mark.parametrize("call", ["lease", "extend"])
async def test_that_another_trainer_has_the_run_is_no_lost_lease(call: str) -> None:
    proxy = FakeProxy([lease("a", "a.0")], failures={call: [Superseded("epoch 2")]})
    async with feed_of(proxy, ttl_s=1.0) as feed:
        with pytest.raises(Superseded):
            await asyncio.wait_for(feed.take(2), 30.0)


async def test_a_superseded_acknowledgement_is_heard() -> None:
    proxy = FakeProxy([lease("a", "a.0")], failures={"acknowledge": [Superseded("epoch 2")]})
    async with feed_of(proxy) as feed:
        await feed.take(1)
        with pytest.raises(Superseded):
            await feed.acknowledge(["a"])
