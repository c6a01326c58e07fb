"""`python -m benchmarks.runs [--rounds 20]`: what changes of one run cost Redis, and whoever waits for them.

Medians over the rounds: Redis's own CPU time (user and system, of its main thread) and the time until the last caller has its
answer. To measure another release, run this file in its checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from steno.contracts.records import Group
from steno.contracts.runs.leases import LeaseRequest
from steno_proxy.store.redis.store import RedisStore
from steno_proxy.store.runs.settlement import EndedTrial
from tests.support.machine.redis_server import PATIENT, RedisServer

TRIALS = 64
WAITERS = 100
Act = Callable[[], Awaitable[Any]]
_names = count()


async def made(store: RedisStore, run_id: str, size: int) -> Group:
    name = f"g{next(_names)}"
    trials = [f"{name}.{number}" for number in range(size)]
    group = Group(group_id=name, run_id=run_id, size=size, trial_ids=trials, created_at=time.time())
    await store.runs.open_group(group)
    return group


def end(store: RedisStore, group: Group, trial_id: str) -> Awaitable[None]:
    trial = EndedTrial(trial_id, group.group_id, "1.0", "train", True, {"l/1": 500, "l/2": 20})
    return store.runs.ended(group.run_id, trial, time.time())


async def ends_at_once(stores: list[RedisStore], run_id: str) -> Act:
    group = await made(stores[0], run_id, TRIALS)

    async def act() -> None:
        calls = (end(stores[at % len(stores)], group, trial_id) for at, trial_id in enumerate(group.trial_ids))
        await asyncio.gather(*calls)

    return act


async def ends_alone(stores: list[RedisStore], run_id: str) -> Act:
    group = await made(stores[0], run_id, TRIALS)

    async def act() -> None:
        for trial_id in group.trial_ids:
            await end(stores[0], group, trial_id)

    return act


async def leases_at_once(stores: list[RedisStore], run_id: str) -> Act:
    """As many waiters as groups of eight; each leases one and acknowledges it."""
    for _ in range(WAITERS):
        group = await made(stores[0], run_id, 8)
        await asyncio.gather(*(end(stores[0], group, trial_id) for trial_id in group.trial_ids))

    async def waiter(number: int) -> None:
        runs = stores[number % len(stores)].runs
        request = LeaseRequest(run_id=run_id, consumer=f"t{number % 4}", request_id=f"{number}")
        [lease] = (await runs.lease(request, at_least=1)).leases
        await runs.acknowledge(lease.lease_id)

    async def act() -> None:
        await asyncio.gather(*map(waiter, range(WAITERS)))

    return act


async def waiters_that_find_nothing(stores: list[RedisStore], run_id: str) -> Act:
    async def act() -> None:
        request = LeaseRequest(run_id=run_id, consumer="t")
        runs = (stores[number % len(stores)].runs for number in range(WAITERS))
        await asyncio.gather(*(one.lease(request, at_least=1) for one in runs))

    return act


CASES: dict[str, tuple[Callable[[list[RedisStore], str], Awaitable[Act]], int]] = {
    f"{TRIALS} trials of a group end at once": (ends_at_once, 1),
    f"{TRIALS} trials of a group end at once, at three replicas": (ends_at_once, 3),
    f"{TRIALS} trials of a group end one after the other": (ends_alone, 1),
    f"{WAITERS} waiters lease {WAITERS} groups and acknowledge them": (leases_at_once, 1),
    f"{WAITERS} waiters lease {WAITERS} groups and acknowledge them, at three replicas": (leases_at_once, 3),
    f"{WAITERS} waiters find nothing": (waiters_that_find_nothing, 1),
}


async def measure(rounds: int) -> None:
    server = RedisServer()
    stores = [RedisStore(server.url, **PATIENT) for _ in range(3)]
    try:
        with server.client() as client:
            client.config_set("appendfsync", "everysec")

            def cpu_ms() -> float:
                told = client.info("cpu")
                return 1000 * (told["used_cpu_user_main_thread"] + told["used_cpu_sys_main_thread"])

            for said, (prepare, replicas) in CASES.items():
                cpu: list[float] = []
                wall: list[float] = []
                for number in range(rounds + 1):
                    act = await prepare(stores[:replicas], f"r{next(_names)}")
                    before, started = cpu_ms(), time.perf_counter()
                    await act()
                    ms = 1000 * (time.perf_counter() - started)
                    if number:  # the first one brings the scripts
                        cpu.append(cpu_ms() - before)
                        wall.append(ms)
                print(
                    f"{said:78} Redis {statistics.median(cpu):7.2f} ms   until all know {statistics.median(wall):7.1f} ms"
                )
    finally:
        for store in stores:
            await store.close()
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    asyncio.run(measure(parser.parse_args().rounds))
