"""A real vLLM of two data-parallel ranks: a conversation finds what its rank has in its cache."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Job, Sampling
from steno.models import TINY
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.engine import VllmTokens

pytestmark = pytest.mark.vllm

TRIALS = 6


async def test_each_turn_of_a_trial_finds_its_conversation_in_the_cache() -> None:
    """By vLLM's own choice, which is by load, the second turn of a trial goes to the rank that has not seen the first."""
    tokens = VllmTokens(
        from_fields({
            "model": str(TINY), "data_parallel_size": 2, "enforce_eager": True, "dtype": "float32", "max_model_len": 2048,
            "max_num_seqs": 8,
        })
    )  # fmt: skip
    await tokens.start()
    try:
        assert tokens.max_streams == 16
        for number in range(TRIALS):
            cached = []
            for turn in range(3):
                prompt = [100 + number, *range(300, 900 + 8 * turn)]
                law = Sampling(max_tokens=2, seed=1)
                asked = tokens.sample(f"{number}-{turn}", prompt, law, Job(), trial_id=f"trial-{number}")
                cached.append([step.cached_tokens async for step in asked][-1])
            assert cached[0] == 0 and min(cached[1:]) >= 512, (number, cached)
    finally:
        await tokens.stop()
