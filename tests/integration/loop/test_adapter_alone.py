"""`steno train --push adapter` through the whole loop: its first push is its adapter, also after it was started again, on more
ranks."""

from __future__ import annotations

from pathlib import Path

from steno.models import TINY
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.loop.product import GROUPS_PER_STEP, Product, Trainer, rolling, thread

ADAPTER = {"push": "adapter", "lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}


async def test_a_trainer_started_again_goes_on_with_its_adapter_under_a_lineage_of_its_own(one: Product) -> None:
    before = one.in_force()
    trainer = one.train(**ADAPTER, total_steps=1, ranks=1)
    # What its agents say before its own first weights are served is another lineage's, and would be orphaned.
    await thread(trainer.until, lambda: one.in_force() != before, "its first weights are not served")
    async with rolling(one, "a", groups=GROUPS_PER_STEP, bounded=False):
        await thread(trainer.wait)
    first = one.in_force()
    assert first == version_of(trainer)
    await thread(one.balance, trainer)
    trainer = one.train(**ADAPTER, total_steps=2, ranks=2)
    await thread(trainer.until, lambda: one.in_force() != first, "its weights are not served again")
    again = one.in_force()
    assert again is not None and first is not None and again.endswith("/1") and again != first
    # The same adapter: another name for the same weights.
    copies = [pushed(trainer.folder, version) for version in (first, again)]
    assert copies[0].manifest.digest == copies[1].manifest.digest
    assert copies[0].manifest.size < (TINY / "model.safetensors").stat().st_size / 4
    async with rolling(one, "b", groups=GROUPS_PER_STEP, bounded=False):
        await thread(trainer.wait)
    assert one.in_force() == version_of(trainer)
    # Agents were sampled by the very adapter that is trained.
    assert len(trainer.steps) == 2
    assert all(step["values"]["mismatch/logprob_difference"] < 1e-3 for step in trainer.steps)
    await thread(one.balance, trainer)


def version_of(trainer: Trainer) -> str:
    return "{}/{}".format(*trainer.saved()["path"][-1])


def pushed(folder: Path, version: str) -> WeightsCopy:
    return WeightsCopy.read(folder / "weights" / f"weights-{version.replace('/', '-')}")
