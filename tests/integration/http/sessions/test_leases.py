"""Leases and runs over REST: an agent's turns become a lease, the admin key alone opens them, and errors say what is wrong."""

from __future__ import annotations

import asyncio

import pytest

from steno.client.client import AsyncClient, Client
from steno.contracts.errors import Conflict, Forbidden, NotFound, Superseded, TrainerAlive
from steno.contracts.policy import Manifest, ShardEntry, TensorEntry, UpdateSpec
from steno.contracts.records import Limits
from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from steno.contracts.runs.leases import Lease, LeaseRequest
from steno_trainer.data.lease_feed import LeaseFeed
from tests.integration.http.conftest import Proxy, running

RUN = "exp 7/π"


async def finished(proxy: Proxy, group_id: str, rewards: tuple[float | None, ...] = (0.0, 1.0)) -> None:
    await proxy.steno.create_group(GroupSpec(group_id=group_id, run_id=RUN, size=len(rewards)))
    for number, reward in enumerate(rewards):
        assert (await proxy.chat(f"{group_id}.{number}", "hello")).status_code == 200
        await proxy.steno.complete(f"{group_id}.{number}", Completion(reward=reward))


def ask(**fields: object) -> LeaseRequest:
    return LeaseRequest.model_validate({"run_id": RUN, "consumer": "trainer"} | fields)


async def test_what_agents_said_becomes_a_lease_and_the_books_balance(proxy: Proxy) -> None:
    await finished(proxy, "g")
    [one] = await proxy.steno.lease(ask())
    sampled = 0
    for found in one.trials:
        [sample] = await proxy.steno.samples(found.trial_id)
        assert sample.reward == found.reward
        assert sum(sample.loss_mask) == sum(one.tokens[found.trial_id].values()) > 0
        sampled += sum(sample.loss_mask)
    view = await proxy.steno.run(RUN)
    assert (sum(view.sampled.values()), view.not_trained, view.groups.leased) == (sampled, {}, 1)
    longer = await proxy.steno.extend(one.lease_id, 5000.0)
    assert longer.expires_at is not None and longer.expires_at > one.expires_at
    assert (await proxy.steno.acknowledge(one.lease_id)).expires_at is None
    await proxy.steno.acknowledge(one.lease_id)
    assert (await proxy.steno.run(RUN)).groups.acknowledged == 1
    assert await proxy.steno.lease(ask()) == []
    with pytest.raises(Conflict):
        await proxy.steno.release(one.lease_id)


async def test_a_lease_waits_for_a_group(proxy: Proxy) -> None:
    waiting = asyncio.ensure_future(proxy.steno.lease(ask(wait_s=60)))
    await finished(proxy, "g")
    [one] = await asyncio.wait_for(waiting, 30)
    assert one.group.group_id == "g"
    with Client(proxy.url) as steno:
        await asyncio.to_thread(steno.release, one.lease_id)
        [again] = await asyncio.to_thread(steno.lease, ask(wait_s=5))
    assert again.grants == 2


async def test_a_trainer_that_stops_before_it_heard_of_its_leases_holds_none(proxy: Proxy) -> None:
    """The proxy has leased the group, and the answer is still on its way when the trainer ends."""
    granted = asyncio.Event()

    class Slow(AsyncClient):
        async def lease(self, request: LeaseRequest) -> list[Lease]:  # type: ignore[override]
            found = await super().lease(request)
            if request.max_groups:
                granted.set()
                await asyncio.Event().wait()
            return found

    await finished(proxy, "g")
    async with Slow(proxy.url) as client, LeaseFeed(client, run_id=RUN, consumer="t", ahead=1):
        await asyncio.wait_for(granted.wait(), 30)
        assert (await proxy.steno.run(RUN)).groups.leased == 1
    groups = (await proxy.steno.run(RUN)).groups
    assert (groups.leased, groups.ready) == (0, 1)


async def test_a_trial_that_spent_its_limit_waits_for_its_harness(proxy: Proxy) -> None:
    spec = GroupSpec(group_id="g", run_id=RUN, size=1, limits=Limits(max_turns=1))
    await proxy.steno.create_group(spec)
    assert (await proxy.chat("g.0", "one")).status_code == 200
    assert (await proxy.chat("g.0", "two")).status_code == 403
    assert (await proxy.steno.session("g.0")).end_reason == "limit:max_turns"
    assert await proxy.steno.lease(ask(wait_s=0.2)) == []
    await proxy.steno.complete("g.0", Completion(reward=0.5))
    [one] = await proxy.steno.lease(ask(wait_s=30))
    assert one.trials[0].reward == 0.5


async def test_trials_outside_groups_and_evaluation_are_accounted_for(proxy: Proxy) -> None:
    await proxy.steno.register("alone", SessionSpec(run_id=RUN))
    await proxy.steno.create_group(GroupSpec(group_id="e", run_id=RUN, size=1, purpose="eval"))
    for trial_id in ("alone", "e.0"):
        assert (await proxy.chat(trial_id, "hello")).status_code == 200
        await proxy.steno.complete(trial_id, Completion(reward=1.0))
    view = await proxy.steno.run(RUN)
    assert set(view.not_trained) == {"ungrouped", "evaluation"}
    assert sum(sum(tokens.values()) for tokens in view.not_trained.values()) == sum(view.sampled.values())
    assert (view.eval_groups.ended, view.groups.in_hand) == (1, 0)


async def test_only_the_admin_key_opens_leases_and_runs() -> None:
    """I8: neither an agent nor a harness learns what a trainer does."""
    async with running(admin_key="admin-key-of-this-test", worker=False) as proxy:
        made = await proxy.steno.create_group(GroupSpec(group_id="g", run_id=RUN, size=1))
        for key in (made.harness_key, made.trials[0].api_key):
            with Client(proxy.url, key) as other:
                for call in (
                    lambda: other.lease(ask()), lambda: other.acknowledge("x"), lambda: other.release("x"),
                    lambda: other.extend("x"), lambda: other.run(RUN), lambda: other.take_over(RUN, "t"),
                    lambda: other.heartbeat(RUN, "t", 1),
                ):  # fmt: skip
                    with pytest.raises(Forbidden):
                        await asyncio.to_thread(call)


async def test_bad_requests_name_the_field(proxy: Proxy) -> None:
    for body, field in (
        ({"run_id": RUN}, "consumer"),
        ({"consumer": "a b"}, "consumer"),
        ({"consumer": "t", "max_groups": -1}, "max_groups"),
        ({"consumer": "t", "wait_s": 1e9}, "wait_s"),
        ({"consumer": "t", "ttl_s": "soon"}, "ttl_s"),
        ({"consumer": "t", "request_id": "/"}, "request_id"),
        ({"consumer": "t", "group": "g"}, "group"),
    ):
        answer = await proxy.http.post("/leases", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    with pytest.raises(NotFound):
        await proxy.steno.acknowledge("nothing")
    answer = await proxy.http.post("/leases/nothing/extend", json={"ttl_s": -1.0})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "ttl_s")


async def test_what_leases_do_is_counted(proxy: Proxy) -> None:
    await finished(proxy, "g")
    [one] = await proxy.steno.lease(ask())
    scraped = (await proxy.http.get("/metrics")).text
    assert 'steno_proxy_groups{state="leased"} 1.0' in scraped
    assert 'steno_proxy_leases_total{how="granted"}' in scraped
    await proxy.steno.release(one.lease_id)
    assert 'steno_proxy_groups{state="ready"} 1.0' in (await proxy.http.get("/metrics")).text


def update(step: int) -> UpdateSpec:
    tensor = TensorEntry(name="w", dtype="float32", shape=[1], digest="0" * 32)
    manifest = Manifest(tensors=[tensor], shards=[ShardEntry(name="a.safetensors", size=8, digest="0" * 32)])
    return UpdateSpec(run_id=RUN, lineage="a", step=step, transport="filesystem", location="/x", manifest=manifest)


async def test_a_trainer_takes_over_and_the_one_before_is_told_whatever_it_asks(proxy: Proxy) -> None:
    for group_id in "ab":
        await finished(proxy, group_id)
    one = await proxy.steno.take_over(RUN, "t1")
    async with AsyncClient(proxy.url, epoch=one.epoch) as first:
        [a] = await first.lease(ask())
        await first.post_update(update(1))
        waiting = asyncio.ensure_future(first.lease(ask(max_groups=2, wait_s=60)))
        await first.heartbeat(RUN, "t1", one.epoch)
        with pytest.raises(TrainerAlive, match="t1 was heard of") as refused:
            await proxy.steno.take_over(RUN, "t2")
        assert 1.0 <= (refused.value.retry_after_s or 0.0) <= 15.0
        two = await proxy.steno.take_over(RUN, "t2", force=True)
        assert (one.epoch, two.epoch) == (1, 2)
        with pytest.raises(Superseded):
            await asyncio.wait_for(waiting, 30)
        for call in (
            first.lease(ask()), first.extend(a.lease_id), first.acknowledge(a.lease_id), first.release(a.lease_id),
            first.post_update(update(2)), first.heartbeat(RUN, "t1", one.epoch),
        ):  # fmt: skip
            with pytest.raises(Superseded):
                await call
    async with AsyncClient(proxy.url, epoch=two.epoch) as second:
        again = await second.lease(ask(max_groups=2))
        assert [lease.group.group_id for lease in again] == ["a", "b"]
        await second.post_update(update(2))
        await second.heartbeat(RUN, "t2", two.epoch, leaving=True)
    for lease in again:
        await proxy.steno.acknowledge(lease.lease_id)
    assert (await proxy.steno.take_over(RUN, "t3")).epoch == 3
    await proxy.steno.post_update(update(3))  # of nobody who registered


async def test_a_run_is_read_without_its_ledger_by_who_asks_often(proxy: Proxy) -> None:
    """It has a number for each policy version and reason, for good, and held-back launchers ask twice a second."""
    await finished(proxy, "g")
    whole, short = await proxy.steno.run(RUN), await proxy.steno.run(RUN, ledger=False)
    assert whole.sampled and short.sampled == {} and short.groups == whole.groups
    assert (await proxy.http.get(f"/runs/{RUN}?ledger=true")).json()["sampled"] == whole.sampled
    answer = await proxy.http.get(f"/runs/{RUN}?ledger=some")
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "ledger")
