"""What new weights sampled waits for their probe; what the old ones sampled does not."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.errors import EngineFailed
from steno_worker.weights.gate import WeightsGate


async def test_only_what_bears_the_new_version_waits() -> None:
    gate = WeightsGate()
    await gate.passed("run/1")
    gate.close("run/1")
    old, unnamed, waiting = (asyncio.create_task(gate.passed(version)) for version in ("base/0", "", "run/1"))
    await asyncio.sleep(0)
    assert gate.shut and not waiting.done()
    for passing in (old, unnamed):
        assert passing.done() and passing.exception() is None
    gate.open()
    await waiting
    assert not gate.shut


async def test_condemned_weights_let_nothing_pass_until_others_are_loaded() -> None:
    gate = WeightsGate()
    gate.close("run/1")
    waiting = asyncio.create_task(gate.passed("run/1"))
    await asyncio.sleep(0)
    gate.condemn("the probe failed")
    for passing in (waiting, gate.passed("base/0"), gate.passed()):
        with pytest.raises(EngineFailed, match="the probe failed"):
            await passing
    gate.close("run/2")
    with pytest.raises(EngineFailed, match="the probe failed"):
        await gate.passed("base/0")
    gate.open()
    await gate.passed("run/2")


async def test_a_stream_of_the_time_of_condemned_weights_is_over_even_if_it_is_looked_at_later() -> None:
    gate = WeightsGate()
    before = gate.era
    gate.close("run/1")
    gate.condemn("the probe failed")
    meanwhile = gate.era
    gate.open()  # the weights of before are loaded again
    for era in (before, meanwhile):
        with pytest.raises(EngineFailed, match="the probe failed"):
            await gate.passed("run/1", era)
    await gate.passed("base/0", gate.era)


async def test_whoever_stops_waiting_leaves_the_others_waiting() -> None:
    gate = WeightsGate()
    gate.close("run/1")
    one, two = (asyncio.create_task(gate.passed("run/1")) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    assert one.cancelled() and not two.done()
    gate.open()
    await two
