"""Waiting for groups to lease, without a poll loop at the store: whoever waits sleeps until something may have got ready.

Knows nothing of HTTP. A group that got ready wakes all who wait for its run; deadlines and the ends of leases are known
beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from steno.contracts.runs.leases import Lease, LeaseRequest
from steno_proxy import metrics
from steno_proxy.store.runs.interface import GrantedLeases, RunStore

LOOK_S = 5.0
"""The longest sleep: a wake-up from another replica may be lost."""
_LEAST_S = 0.05
"""The shortest, where something should be ready by now and is not."""


async def lease(
    runs: RunStore,
    request: LeaseRequest,
    gone: Callable[[], Awaitable[bool]],
    clock: Callable[[], float | None] = lambda: None,
    stopping: asyncio.Event | None = None,
    epoch: int | None = None,
) -> list[Lease]:
    """Leases of `max_groups` groups as soon as so many are ready; after `wait_s`, leases of the groups that are ready then.

    No group is reserved during the wait: another trainer may lease it. Cancel-safe; a lease that was granted and never reached
    its trainer runs out, and its group is served again.

    Args: gone: whether the caller has left. Nothing is granted to it then. clock: what `RunStore` takes as now.
        stopping: when it is set, whoever waits gets what there is, and asks another replica.
        epoch: of a registered trainer. Raises: Superseded, also while it waits.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + request.wait_s
    stopping = stopping or asyncio.Event()
    slept = False
    with runs.watch(request.run_id) as woken:
        while True:
            woken.clear()
            left_s = 0.0 if stopping.is_set() else until - loop.time()
            if slept and await gone():
                return []
            at_least = request.max_groups if left_s > 0 else 1
            granted = await runs.lease(request, at_least=at_least, epoch=epoch, now=clock())
            if granted.leases or left_s <= 0:
                _count(granted)
                return granted.leases
            sleep_s = min(left_s, LOOK_S)
            if granted.next_in_s is not None:
                sleep_s = min(sleep_s, max(granted.next_in_s, _LEAST_S))
            slept = True
            await _sleep(sleep_s, woken, stopping)


async def _sleep(seconds: float, *until: asyncio.Event) -> None:
    """So long, or until one of these is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in until]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _count(granted: GrantedLeases) -> None:
    for found, waited_s in zip(granted.leases, granted.waited_s, strict=True):
        metrics.LEASES.labels("granted" if found.grants == 1 else "returned").inc()
        if found.grants == 1:
            metrics.READY_SECONDS.observe(waited_s)
