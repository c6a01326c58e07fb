"""SIGTERM and resume: what goes on from the checkpoint is bit by bit what never stopped, given the same leases."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.loop.product import RUN, SLOW_S, Product, Trainer, rolling, thread
from tests.support.programs.processes import until

pytestmark = pytest.mark.loop
TIMED = ("time/", "throughput/", "memory/", "queue/")
GROUPS, STEPS = 12, 6


@pytest.mark.timeout(1800)
async def test_stopped_by_sigterm_and_resumed_is_as_if_never_stopped(one: Product) -> None:
    """The groups are on record before either run, and the store is put back between them, so both are served the same. The one
    that is stopped pushes its weights by difference, which changes nothing of what is trained."""
    async with rolling(one, "task", groups=GROUPS, bounded=False) as done:
        assert all(result.reward is not None for result in await done)
    recorded = dump(one)

    never = one.train(name="never", total_steps=STEPS, max_staleness_steps=STEPS, checkpoint_every=100)
    await thread(never.wait)
    assert [path.name for path in never.checkpoints()] == [f"step-{STEPS:08d}"], "the last step is written once"
    await thread(one.stack.proxy.kill)
    await thread(restore, one, recorded)
    await thread(one.restart_proxy)

    settings = {"total_steps": STEPS, "max_staleness_steps": STEPS, "checkpoint_every": 100, "push": "delta"}
    stopped = one.train(name="stopped", die="steno_trainer.model.zero_engine:PolicyEngine.update:2:told", **settings)
    await thread(stopped.process.wait, SLOW_S)
    at = stopped.steps[-1]["step"]
    assert at < STEPS and stopped.saved()["path"][-1][1] == at, stopped.said()
    await thread(until, lambda: held_by_nobody(one), "its leases are not over")
    resumed = one.train(name="stopped", **settings)
    await thread(resumed.wait)

    assert [step["step"] for step in resumed.steps] == list(range(1, STEPS + 1))
    for ours, theirs in zip(resumed.steps, never.steps, strict=True):
        assert untimed(ours["values"]) == untimed(theirs["values"]), ours["step"]
        assert ours["ledger"] == theirs["ledger"]
    for name, weight in weights(never).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    folders = {path.name.partition("-")[0] for path in (resumed.folder / "weights").iterdir()}
    assert "changes" in folders, "neither of the last two pushes was by difference"
    assert "was not taken" not in resumed.said() and "does not serve" not in resumed.said()
    assert resumed.saved()["ledger"].to_bytes() == never.saved()["ledger"].to_bytes()
    await thread(one.balance, resumed)


def held_by_nobody(one: Product) -> bool:
    with one.client() as client:
        groups = client.run(RUN).groups
    return groups.leased + groups.used == 0


def dump(one: Product) -> dict[bytes, tuple[bytes, int | None]]:
    """The whole store: key -> value and when it expires, in Unix milliseconds."""
    with one.redis.client() as redis:
        found = {}
        for key in redis.scan_iter("*"):
            left_ms = redis.pttl(key)
            found[key] = (redis.dump(key), int(time.time() * 1000) + left_ms if left_ms > 0 else None)
        return found


def restore(one: Product, recorded: dict[bytes, tuple[bytes, int | None]]) -> None:
    with one.redis.client() as redis:
        redis.flushall()
        for key, (value, expires) in recorded.items():
            redis.restore(key, expires or 0, value, absttl=expires is not None)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    [copy] = trainer.newest().glob("weights-*")
    return {name: tensor for shard in Path(copy).glob("*.safetensors") for name, tensor in load_file(shard).items()}


def untimed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith(TIMED)}
