"""What an update may cost the proxy: memory of a few chunks, whatever the size of the model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from benchmarks.targets import process_cpu_s
from steno.client.client import AsyncClient
from tests.support.contracts.policy import spec
from tests.support.programs.stack import Stack, running
from tests.support.workers.update_peer import UpdatePeer

MIB = 1 << 20
MODEL_BYTES = 200 * MIB
CREDIT_BYTES = 8 * MIB


def resident_mb(pid: int, field: str) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


async def longest_pause(stack: Stack) -> float:
    """Seconds for which this process or the proxy got no processor at most, once it is cancelled. One that is busy counts not."""
    longest_s, seen, busy_s = 0.0, time.monotonic(), process_cpu_s(stack.proxy.pid)
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(timeout=60) as http:
                await http.get(f"{stack.url}/healthz")
            now, used_s = time.monotonic(), process_cpu_s(stack.proxy.pid)
            longest_s = max(longest_s, now - seen - (used_s - busy_s))
            seen, busy_s = now, used_s
    return longest_s


async def test_a_proxy_holds_a_few_chunks_of_what_it_passes_on(tmp_path: Path) -> None:
    with running(tmp_path / "run", None) as stack:
        peers = [UpdatePeer(name, discard=True, credit=CREDIT_BYTES) for name in ("one", "two")]
        for peer in peers:
            await peer.dial(stack.port)
        async with AsyncClient(stack.url) as steno:
            update = await steno.post_update(spec(1, transport="stream", location="", shards=1, size=MODEL_BYTES))
            before_mb = resident_mb(stack.proxy.pid, "VmRSS")
            sent = 0

            async def zeros(offset: int) -> AsyncIterator[bytes]:
                nonlocal sent
                for at in range(offset, MODEL_BYTES, MIB):
                    sent += min(MIB, MODEL_BYTES - at)
                    yield bytes(min(MIB, MODEL_BYTES - at))

            stood = asyncio.create_task(longest_pause(stack))
            async with asyncio.timeout(300):
                while update.state == "running":
                    # A worker that has not begun to receive is sent again what it missed.
                    both = [worker.state for worker in update.workers] == ["receiving"] * 2
                    for want in update.wants if both or sent else ():
                        await steno.upload_shard(update.update_id, want.shard, want.offset, zeros(want.offset))
                    update = await steno.update(update.update_id, wait_s=10)
        assert (update.state, [worker.received for worker in update.workers]) == ("done", [MODEL_BYTES] * 2)
        stood.cancel()
        if await stood < 4.0:  # one that takes nothing for 5 s is left behind, and both are here
            assert sent < 1.5 * MODEL_BYTES, "one upload serves both"
        assert all(peer.most_ahead <= CREDIT_BYTES for peer in peers)
        grown_mb = resident_mb(stack.proxy.pid, "VmHWM") - before_mb
        assert grown_mb < 64, f"{grown_mb:.0f} MB for {MODEL_BYTES / MIB:.0f} MB of weights and two workers"
        for peer in peers:
            await peer.die()
