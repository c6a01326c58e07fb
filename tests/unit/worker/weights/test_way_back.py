"""A worker on its way back from weights that its probe refused, and what it is told meanwhile (I10).

The proxy answers a worker that is not well with the update in force, at once: it comes while that update is loaded again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from steno.contracts.errors import EngineFailed, WeightsRefused
from steno.contracts.policy import UpdateSpec
from steno.contracts.wire.frames import Apply, Progress
from tests.support.waiting import until
from tests.support.weights.shards import two_shards, write
from tests.unit.worker.weights.test_patched_updates import Side, side
from tests.unit.worker.weights.test_updates import PROBE, SHARDS, Bench, Proxy, bench, folder_spec, idle, stream_spec

__all__ = ["bench", "side"]


async def serve(proxy: Proxy, spec: UpdateSpec, update_id: str = "u1") -> None:
    proxy.prepare(spec, update_id)
    if spec.transport == "stream":
        await proxy.until("receiving")
        await proxy.upload(update_id=update_id)
    await proxy.until("ready")
    proxy.tell(Apply(update_id))
    await proxy.until("served")


async def refuse_and_hold(bench: Bench, proxy: Proxy, spec: UpdateSpec, update_id: str = "u2") -> Progress:
    """Until the probe of these weights has failed. The way back has begun, and lasts until `may_load` is set."""
    engine, good = bench.engine, bench.engine.scores

    def judge() -> None:
        engine.scores = [-1.0, -5.0] if engine.version == spec.version else good

    def hold() -> None:
        judge()
        if engine.version == spec.version:
            engine.during = judge
            engine.may_load.clear()

    engine.during = hold
    proxy.prepare(spec, update_id)
    if spec.transport == "stream":
        await proxy.until("receiving")
        await proxy.upload(update_id=update_id)
    await proxy.until("ready")
    proxy.tell(Apply(update_id))
    failed = await proxy.until("failed")
    assert not bench.updates.healthy
    return failed


async def turns(count: int = 20) -> None:
    """Let others run."""
    for _ in range(count):
        await asyncio.sleep(0)


def loaded(bench: Bench) -> list[str]:
    return [update.version for update in bench.engine.loaded]


@pytest.mark.parametrize("transport", ["filesystem", "stream"])
async def test_the_update_that_a_worker_goes_back_to_may_be_prepared_meanwhile(
    bench: Bench, tmp_path: Path, transport: str
) -> None:
    first, second = (
        folder_spec(tmp_path, step, probe=PROBE) if transport == "filesystem" else stream_spec(step, probe=PROBE)
        for step in (1, 2)
    )
    proxy = bench.proxy()
    await serve(proxy, first)
    await refuse_and_hold(bench, proxy, second)
    proxy.prepare(first)
    await turns()
    bench.engine.may_load.set()
    assert (await proxy.until("served")).update_id == "u1"
    await idle(bench)
    assert loaded(bench) == ["run/1", "run/2", "run/1"]
    assert bench.updates.healthy and bench.updates.cards()[0].policy_version == "run/1"
    assert not bench.updates.gate.shut


@pytest.mark.parametrize("when", ["during", "staged before", "after"])
async def test_other_weights_of_the_version_that_a_worker_goes_back_to_are_refused(
    bench: Bench, tmp_path: Path, when: str
) -> None:
    first, second = (folder_spec(tmp_path, step, probe=PROBE) for step in (1, 2))
    manifest = write(tmp_path / "others", two_shards(fill=9))
    others = first.model_copy(update={"manifest": manifest, "location": str(tmp_path / "others")})
    proxy = bench.proxy()
    await serve(proxy, first)
    await refuse_and_hold(bench, proxy, second)
    if when == "staged before":
        bench.updates._returning_to = ""  # as if it had been staged before the way back began
    if when != "after":
        proxy.prepare(others, "others")
    if when == "staged before":
        await proxy.until("ready")
        proxy.tell(Apply("others"))
    await turns()
    bench.engine.may_load.set()
    await until(lambda: bench.updates.healthy)
    if when == "after":
        proxy.prepare(others, "others")
    assert "run/1 is known with other digests" in (await proxy.until("failed")).message
    proxy.prepare(first)
    assert proxy.frames[-1].state == "served" and loaded(bench) == ["run/1", "run/2", "run/1"]


async def test_what_an_engine_was_started_from_is_known_by_its_version_alone(bench: Bench, tmp_path: Path) -> None:
    bench.engine.folder, bench.engine.check_files = tmp_path / "model", False
    write(bench.engine.folder, {"model.safetensors": {name: one for of in SHARDS.values() for name, one in of.items()}})
    proxy = bench.proxy()
    await refuse_and_hold(bench, proxy, folder_spec(tmp_path, 1, probe=PROBE))
    bench.engine.may_load.set()
    await until(lambda: bench.updates.healthy)
    proxy.prepare(folder_spec(tmp_path, 0, lineage="base"), "u0")
    assert proxy.frames[-1].state == "served" and loaded(bench) == ["run/1", "base/0"]


async def test_nor_does_a_patched_update_end_its_way_back_or_travel_again(side: Side) -> None:
    assert await side.serve(side.trained.push(0)) == ""
    first = side.trained.push(1)
    assert await side.serve(first) == ""
    second, engine = side.trained.push(2), side.bench.engine

    def judge() -> None:
        engine.scores = [float("nan")] if engine.version == "run/2" else [-1.0]

    def hold() -> None:
        judge()
        if engine.version == "run/2":
            engine.during = judge
            engine.may_load.clear()

    engine.during = hold
    await side.prepare(second)
    side.proxy.tell(Apply(second.update_id))
    await side.proxy.until("failed")
    side.proxy.frames.clear()
    side.proxy.prepare(first, first.update_id)
    await turns()
    engine.may_load.set()
    await side.proxy.until("served")
    assert [frame.state for frame in side.proxy.frames] == ["served"]
    assert loaded(side.bench) == ["run/0", "run/1", "run/2", "run/1"] and side.bench.updates.healthy


async def test_refused_weights_are_refused_at_once_while_their_worker_goes_back(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    await serve(proxy, folder_spec(tmp_path, 1, probe=PROBE))
    second = folder_spec(tmp_path, 2, probe=PROBE)
    failed = await refuse_and_hold(bench, proxy, second)
    heard = len(proxy.frames)
    proxy.prepare(second, "u2")  # the proxy asks again after 5 s, and a way back may take longer
    assert [(frame.state, frame.message) for frame in proxy.frames[heard:]] == [("failed", failed.message)]
    bench.engine.may_load.set()
    await idle(bench)
    assert loaded(bench) == ["run/1", "run/2", "run/1"] and bench.updates.healthy


async def test_a_newer_update_is_staged_during_the_way_back_and_loaded_after_it(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    await serve(proxy, folder_spec(tmp_path, 1, probe=PROBE))
    await refuse_and_hold(bench, proxy, folder_spec(tmp_path, 2, probe=PROBE))
    proxy.prepare(folder_spec(tmp_path, 3, probe=PROBE), "u3")
    await proxy.until("ready")
    proxy.tell(Apply("u3"))
    bench.engine.may_load.set()
    await until(lambda: bench.updates.healthy)
    await proxy.until("served")
    assert loaded(bench) == ["run/1", "run/2", "run/1", "run/3"]


async def test_where_the_way_back_fails_what_was_prepared_meanwhile_is_staged_and_loaded(
    bench: Bench, tmp_path: Path
) -> None:
    proxy, first = bench.proxy(), folder_spec(tmp_path, 1, probe=PROBE)
    await serve(proxy, first)
    await refuse_and_hold(bench, proxy, folder_spec(tmp_path, 2, probe=PROBE))
    proxy.prepare(first)
    await turns()
    bench.engine.error = WeightsRefused("the copy is damaged")
    bench.engine.may_load.set()
    await proxy.until("ready")
    assert not bench.updates.healthy
    bench.engine.error = None
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    assert bench.updates.healthy and loaded(bench) == ["run/1", "run/2", "run/1"]


async def test_a_worker_that_is_closed_waits_for_its_way_back(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    await serve(proxy, folder_spec(tmp_path, 1, probe=PROBE))
    await refuse_and_hold(bench, proxy, folder_spec(tmp_path, 2, probe=PROBE))
    closing = asyncio.create_task(bench.updates.close())
    await turns()
    assert not closing.done()
    bench.engine.may_load.set()
    await closing
    assert bench.updates.healthy and loaded(bench)[-1] == "run/1"


async def test_a_load_that_broke_half_way_is_gone_back_from_whatever_is_prepared_meanwhile(
    bench: Bench, tmp_path: Path
) -> None:
    proxy, first = bench.proxy(), folder_spec(tmp_path, 1, probe=PROBE)
    await serve(proxy, first)

    def break_once() -> None:
        bench.engine.during = lambda: None
        bench.engine.may_load.clear()
        raise EngineFailed("a worker process is gone")

    proxy.prepare(folder_spec(tmp_path, 2, probe=PROBE), "u2")
    await proxy.until("ready")
    bench.engine.during = break_once
    proxy.tell(Apply("u2"))
    await proxy.until("failed")
    proxy.prepare(first)
    await turns()
    bench.engine.may_load.set()
    assert (await proxy.until("served")).update_id == "u1"
    assert bench.updates.healthy and loaded(bench) == ["run/1", "run/1"]
