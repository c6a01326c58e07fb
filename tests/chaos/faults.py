"""Carries out one fault of a schedule on a deployment, and takes it back when its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable

import redis

from tests.chaos.deployment import Deployment, Program
from tests.chaos.schedule import Fault

SLOW_S = 0.05
FULL_BYTES = 1_000_000


async def strike(deployment: Deployment, fault: Fault, update: Callable[[], Awaitable[None]]) -> None:
    """Returns once the fault is over. update: posts new weights."""
    where, what = fault.kind.split("-", 1)
    if where in ("worker", "replica"):
        await _process((deployment.workers if where == "worker" else deployment.replicas)[fault.target], what, fault)
    elif where in ("link", "agents", "store"):
        relays = {"link": deployment.links, "agents": deployment.agents, "store": deployment.store}[where]
        relay = relays[fault.target]
        if what == "cut":
            relay.cut()
        elif what == "half":
            relay.half_cut()
        elif what == "lose":
            relay.lose()
        elif what == "bytes":
            relay.cut_after_bytes = fault.amount
        elif what == "stall":
            relay.pause()
            await asyncio.sleep(fault.lasts_s)
            relay.resume()
        elif what == "slow":
            relay.delay_s = SLOW_S
            await asyncio.sleep(fault.lasts_s)
            relay.delay_s = 0.0
    elif where == "redis":
        await _redis(deployment, what, fault)
    else:
        await update()


async def _process(program: Program, what: str, fault: Fault) -> None:
    if what == "kill":
        program.signal(signal.SIGKILL)
        await program.ended(10)
        await asyncio.sleep(fault.lasts_s)
        program.start()
    elif what == "stop":
        program.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.lasts_s)
        program.signal(signal.SIGCONT)
    elif what == "drain":
        program.signal(signal.SIGTERM)
        await program.ended(15)
        await asyncio.sleep(fault.lasts_s)
        program.start()
    elif what == "clock":
        program.signal(signal.SIGUSR2)
        await asyncio.sleep(fault.lasts_s)
        program.signal(signal.SIGUSR1)


async def _redis(deployment: Deployment, what: str, fault: Fault) -> None:
    server = deployment.redis
    if what in ("disk", "misconf") and server.disk is None:
        what = "full"  # no disk of its own can be had here
    if what == "kill":
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(fault.lasts_s)
    elif what == "stop":
        server.pause()
        await asyncio.sleep(fault.lasts_s)
        server.resume()
        return
    elif what in ("disk", "misconf"):
        await asyncio.to_thread(server.fill_disk, gives_up=what == "disk")
        await asyncio.sleep(fault.lasts_s)
    else:
        with contextlib.suppress(redis.RedisError), server.client() as client:  # it may be away, by another fault
            if what == "pause":
                client.execute_command("CLIENT PAUSE", int(fault.lasts_s * 1000), "ALL")
            else:
                client.config_set("maxmemory", FULL_BYTES)
        await asyncio.sleep(fault.lasts_s)
        if what == "pause":
            return
    await asyncio.to_thread(server.ensure)
