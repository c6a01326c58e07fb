"""One full loop on the real engine with an adapter in place of the model: `steno train --push adapter` on two gloo ranks, vLLM
started for adapters. A trainer whose adapter it can't take ends before its first step, and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from steno.models import TINY
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.loop.product import Product, product, rolling, thread
from tests.support.weights.trained import logprobs_of
from tests.support.workers.updating import Answer, check_turn, committed

pytestmark = pytest.mark.vllm

ENGINE = (
    "--", "--enforce-eager", "--dtype=float32", "--max-num-seqs=8", "--max-model-len=2048", "--enable-lora",
    "--max-lora-rank=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    worker = ("--engine", "vllm", "--model", str(TINY), "--worker-id", "w0", *ENGINE)
    with product(tmp_path_factory.mktemp("loop"), worker=None) as running:
        running.stack.start_worker(*worker)
        running.stack.wait_for_model(600)
        yield running


async def test_a_rank_that_the_engine_was_not_started_for_ends_the_trainer_at_its_start(one: Product) -> None:
    trainer = one.train(name="wide", push="adapter", lora_rank=16, total_steps=1, run="wide")
    await thread(trainer.died)
    said = " ".join(trainer.log.read_text().split())
    assert "adapter.rank: got 16, this engine was started for 8 at most (--max-lora-rank)" in said
    assert not trainer.metrics and not trainer.checkpoints()


@pytest.mark.parametrize("transport", ["filesystem", "stream"])
async def test_after_a_step_the_engine_says_what_peft_says_of_the_checkpoint(one: Product, transport: str) -> None:
    served = one.in_force()
    trainer = one.train(
        name=transport, transport=transport, push="adapter", lora_rank=8, lora_alpha=16, total_steps=2, learning_rate=1e-2,
        run=transport,
    )  # fmt: skip
    # What its agents say before its own first weights are served is another lineage's, and would be orphaned.
    await thread(trainer.until, lambda: one.in_force() not in (None, served), "its first weights are not served")
    async with rolling(one, transport, run=transport, groups=4, bounded=False) as done:
        assert all(result.reward is not None for result in await done)
        await thread(trainer.wait)
    assert [step["values"]["batch/trained_tokens"] > 0 for step in trainer.steps] == [True, True]
    assert trainer.steps[0]["values"]["mismatch/logprob_difference"] < 1e-3
    version = "{}/{}".format(*trainer.saved()["path"][-1])
    assert version.endswith("/2") and one.in_force() == version
    copy = WeightsCopy.read(trainer.folder / "weights" / f"weights-{version.replace('/', '-')}")
    assert copy.manifest.size < (TINY / "model.safetensors").stat().st_size / 4
    [folder] = trainer.newest().glob("adapter-*")
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    pushed = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), folder).eval()
    trial = f"after-{transport}"
    await thread(Answer(one.stack, trial, 60).wait)
    turn = await thread(committed, one.stack, trial)
    check_turn(turn, {version: pushed}, [version])
    ids = turn["new_prompt_ids"] + turn["completion_ids"]
    moved = max(abs(a - b) for a, b in zip(logprobs_of(pushed, ids), logprobs_of(before, ids), strict=True))
    assert moved > 1e-2, "the steps changed nothing, so that nothing was proved"
    await thread(one.balance, trainer, transport)
