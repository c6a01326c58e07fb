"""The README's `steno train` at its defaults: bfloat16, two ranks, the shipped model, a worker that computes in float32."""

from __future__ import annotations

import pytest

from steno.models import TINY
from tests.integration.loop.product import GROUPS_PER_STEP, RUN, Product, rolling, thread

pytestmark = pytest.mark.loop


async def test_the_readmes_command_trains_and_every_version_is_served(one: Product) -> None:
    async with rolling(one, "task"):
        words = ["--model", str(TINY), "--run", RUN, "--groups-per-step", str(GROUPS_PER_STEP), "--total-steps", "2"]
        trainer = one.train_plainly(*words)
        await thread(trainer.wait)
    assert [line["step"] for line in trainer.steps] == [1, 2]
    assert "does not serve" not in trainer.log.read_text() and "was not taken" not in trainer.log.read_text()
    newest = trainer.steps[-1]["version"]
    assert one.in_force() == newest and newest.endswith("/2")
    (worker,) = one.stack.get("/workers")["items"]
    assert worker["healthy"] and worker["models"][0]["policy_version"] == newest
