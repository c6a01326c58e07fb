"""Carries out one fault of a schedule on a deployment, and takes it back when its time is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from tests.chaos.schedule import Fault
from tests.chaos.system import packets
from tests.chaos.system.deployment import Deployment, Program
from tests.support.machine.tcprelay import TcpRelay

SLOW_S = 0.05


async def strike(deployment: Deployment, fault: Fault, update: Callable[[str], Awaitable[None]]) -> None:
    """Returns once the fault is over. update: posts new weights of a policy."""
    where, what = fault.kind.split("-", 1)
    if where in ("worker", "replica"):
        await _process((deployment.workers if where == "worker" else deployment.replicas)[fault.target], what, fault)
    elif where == "link":
        await _line(deployment.links[fault.target], what, fault)
    elif where == "agents":
        await _line(deployment.agents[fault.target], what, fault)
    elif where == "store":
        await _line(deployment.line(fault.target), what, fault)
    elif where == "redis":
        await _redis(deployment, what, fault)
    elif where == "failover":
        await _failover(deployment, what, fault)
    else:
        await update("other" if what == "other" else "default")


async def _line(relay: TcpRelay, what: str, fault: Fault) -> None:
    if what in packets.WAYS:
        if packets.inside():
            with packets.lost(relay.port, what):
                await asyncio.sleep(fault.lasts_s)
            return
        what = "slow" if what == "loss" else "stall"
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


async def _process(program: Program, what: str, fault: Fault) -> None:
    if what == "kill":
        program.signal(signal.SIGKILL)
        await program.ended(10)
        await asyncio.sleep(fault.lasts_s)
        program.start()
    elif what in ("stop", "freeze"):
        program.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.lasts_s)
        program.signal(signal.SIGCONT)
    elif what == "drain":
        program.signal(signal.SIGTERM)
        await program.ended(15)
        await asyncio.sleep(fault.lasts_s)
        program.start()
    elif what == "clock":
        starts = program.starts
        program.signal(signal.SIGUSR2)
        await asyncio.sleep(fault.lasts_s)
        if program.starts == starts:  # a later one has the true time, and may not take the signal yet
            program.signal(signal.SIGUSR1)


async def _redis(deployment: Deployment, what: str, fault: Fault) -> None:
    server = deployment.redis.primary
    if what in ("disk", "misconf") and server.disk is None:
        what = "full"  # no disk of its own can be had here
    if what == "kill":
        await asyncio.to_thread(server.kill)
    elif what == "stop":
        server.pause()
    elif what == "pause":
        await asyncio.to_thread(server.hold, fault.lasts_s)
    elif what == "full":
        await asyncio.to_thread(server.fill_memory)
    else:
        await asyncio.to_thread(server.fill_disk, gives_up=what == "disk")
    await asyncio.sleep(fault.lasts_s)
    if what == "stop":
        server.resume()
    elif what != "pause":
        await asyncio.to_thread(server.ensure)


async def _failover(deployment: Deployment, what: str, fault: Fault) -> None:
    """Strike the primary for longer than the Sentinels wait, or `ask` them to switch: the replica takes over, and the old primary
    comes back as its replica."""
    store = deployment.redis
    if what == "cut":
        relay = deployment.lines[store.place]
        relay.pause()
        await asyncio.sleep(fault.lasts_s)
        relay.resume()
    elif what == "ask":
        await asyncio.to_thread(store.switch)
    else:
        await _redis(deployment, what, fault)
