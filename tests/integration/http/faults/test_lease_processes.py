"""Two proxies on one Redis, as processes: one is killed while trials complete. What was answered holds, the rest is repeated."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Unreachable
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.programs.stack import running
from tests.support.records.groups import speak
from tests.support.waiting import until

GROUPS = 12
TOKENS = 5


async def test_a_killed_proxy_loses_no_group_and_serves_none_twice(tmp_path: Path, redis_server: RedisServer) -> None:
    options = ["--redis-url", redis_server.url]
    with running(tmp_path / "a", None, proxy=options) as first, running(tmp_path / "b", None, proxy=options) as second:
        store = RedisStore(redis_server.url, **PATIENT)
        async with AsyncClient(first.url, retries=0) as dying, AsyncClient(second.url) as steno:
            trials = []
            for number in range(GROUPS):
                made = await steno.create_group(GroupSpec(group_id=f"killed-{number}", run_id="killed", size=2))
                for found in made.trials:
                    await speak(store, found.session.trial_id, TOKENS)
                    trials.append(found.session.trial_id)
            waiting = asyncio.ensure_future(steno.lease(ask(wait_s=60)))
            answered = 0

            async def complete(trial_id: str) -> None:
                nonlocal answered
                try:
                    await dying.complete(trial_id, Completion(reward=1.0))
                    answered += 1
                except Unreachable:
                    await steno.complete(trial_id, Completion(reward=1.0))
                if answered == GROUPS:
                    first.proxy.kill()

            await asyncio.gather(*map(complete, trials))
            assert first.proxy.wait(60) == -signal.SIGKILL
            leases = await waiting
            assert len(leases) == 1, "who waits at another replica is woken"
            while more := await steno.lease(ask(max_groups=5)):
                leases += more
            held = sorted(one.group.group_id for one in leases)
            assert held == sorted(f"killed-{number}" for number in range(GROUPS))
            view = await steno.run("killed")
            assert view.sampled == {"l/1": 2 * GROUPS * TOKENS}
            assert view.not_trained == {}
            await asyncio.gather(*(steno.acknowledge(one.lease_id) for one in leases))
            assert (await steno.run("killed")).groups.acknowledged == GROUPS
        await store.close()


async def test_a_dead_trainers_lease_is_served_by_the_other_replica(tmp_path: Path, redis_server: RedisServer) -> None:
    options = ["--redis-url", redis_server.url]
    with running(tmp_path / "a", None, proxy=options) as first, running(tmp_path / "b", None, proxy=options) as second:
        store = RedisStore(redis_server.url, **PATIENT)
        async with AsyncClient(first.url) as one, AsyncClient(second.url) as other:
            await one.create_group(GroupSpec(group_id="dead", run_id="dead", size=1))
            await speak(store, "dead.0", TOKENS)
            await one.complete("dead.0", Completion(reward=1.0))
            [lost] = await one.lease(ask(run_id="dead", ttl_s=2.0))
            [found] = await other.lease(ask(run_id="dead", consumer="another", wait_s=60))
            assert (found.group.group_id, found.grants) == ("dead", 2)
            with pytest.raises(Conflict):
                await one.acknowledge(lost.lease_id)
            await other.acknowledge(found.lease_id)
        await store.close()


def ask(**fields: object) -> LeaseRequest:
    return LeaseRequest.model_validate({"run_id": "killed", "consumer": "trainer"} | fields)


async def test_a_proxy_that_stops_lets_those_go_who_wait_for_what_may_come_later(tmp_path: Path) -> None:
    """Trainers wait for leases by the minute, and watchers for events: they ask another replica, and no log complains."""
    with running(tmp_path, None) as stack:
        async with AsyncClient(stack.url, retries=0) as steno:
            await steno.create_group(GroupSpec(group_id="later", run_id="later", size=1))
            leasing = asyncio.create_task(steno.lease(ask(run_id="later", wait_s=60)))
            watching = asyncio.create_task(watch(steno, "later.0"))
            at_proxy = psutil.Process(stack.proxy.pid)
            await until(lambda: sum(each.status == "ESTABLISHED" for each in at_proxy.net_connections("tcp")) >= 2)
            for _ in range(5):  # both have been read by the time that what was asked after them is answered
                await steno.run("later")
            os.kill(stack.proxy.pid, signal.SIGTERM)
            assert await asyncio.wait_for(leasing, 60) == []
            with pytest.raises(Unreachable, match="ended the event stream"):
                await asyncio.wait_for(watching, 60)
            assert await asyncio.to_thread(stack.proxy.wait, 60) == 0
        assert not [line for line in stack.logs().splitlines() if "ERROR" in line or "Traceback" in line]


async def watch(steno: AsyncClient, trial_id: str) -> None:
    async for _ in steno.events(trial_id):
        pass
