"""One full loop on the real engine: vLLM behind the proxy with Redis, turns by the official SDK, a GRPO step by `steno train` on
two gloo ranks, new weights into vLLM. Afterwards vLLM says what the trainer's weights say, and its tokens bear their version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.models import TINY
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.loop.product import Product, product, rolling, thread
from tests.support.weights.trained import logprobs_of
from tests.support.workers.updating import Answer, check_turn, committed

pytestmark = pytest.mark.vllm

ENGINE = ("--", "--enforce-eager", "--dtype=float32", "--max-num-seqs=8", "--max-model-len=2048")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    worker = ("--engine", "vllm", "--model", str(TINY), "--worker-id", "w0", *ENGINE)
    with product(tmp_path_factory.mktemp("loop"), worker=None) as running:
        running.stack.start_worker(*worker)
        running.stack.wait_for_model(600)
        yield running


@pytest.mark.parametrize(("transport", "push"), [("filesystem", "full"), ("stream", "delta")])
async def test_after_a_step_the_engine_says_what_the_trainers_weights_say(
    one: Product, transport: str, push: str
) -> None:  # fmt: skip
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    served = one.in_force()
    trainer = one.train(
        name=transport, transport=transport, push=push, total_steps=1, learning_rate=1e-3, run=transport
    )
    # What its agents say before its own first weights are served is another lineage's, and would be orphaned.
    await thread(trainer.until, lambda: one.in_force() not in (None, served), "its first weights are not served")
    async with rolling(one, transport, run=transport, groups=2, bounded=False) as done:
        assert all(result.reward is not None for result in await done)
        await thread(trainer.wait)
    [step] = trainer.steps
    assert step["values"]["batch/trained_tokens"] > 0 and step["values"]["mismatch/logprob_difference"] < 1e-3
    version = "{}/{}".format(*trainer.saved()["path"][-1])
    assert version.endswith("/1") and one.in_force() == version
    kind = "weights" if push == "full" else "changes"
    copy = WeightsCopy.read(trainer.folder / "weights" / f"{kind}-{version.replace('/', '-')}")
    [whole] = trainer.newest().glob("weights-*")  # the same weights, with a configuration
    assert copy.manifest.tensors == WeightsCopy.read(whole).manifest.tensors
    assert len(copy.manifest.patches) == (push == "delta")
    pushed = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    trial = f"after-{transport}"
    await thread(Answer(one.stack, trial, 60).wait)
    turn = await thread(committed, one.stack, trial)
    check_turn(turn, {version: pushed}, [version])
    ids = turn["new_prompt_ids"] + turn["completion_ids"]
    moved = max(abs(a - b) for a, b in zip(logprobs_of(pushed, ids), logprobs_of(before, ids), strict=True))
    assert moved > 1e-2, "the step changed nothing, so that nothing was proved"
    await thread(one.balance, trainer, transport)
