"""What new prompts may share of vLLM's cache, while weights come, are gone back from and come again (I10).

vLLM is not installed here: fakes answer what `engine.py` asks. With the real one it is in
tests/integration/vllm/weights/test_updates.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import WeightsRefused
from steno_worker.interfaces import StagedUpdate
from tests.support.weights.shards import manifest_of, spec, two_shards
from tests.unit.worker.engines.vllm.no_vllm import without_vllm


@pytest.fixture
def engine_module() -> Iterator[Any]:
    with without_vllm("steno_worker.engines.vllm.engine") as module:
        yield module


class Weights:
    """Loads what it is told to, unless it is `refused`. cached: under which salts the weights now loaded have cached, with those
    that had before and were not cleared."""

    def __init__(self) -> None:
        self.refused = False
        self.loaded = "base/0"
        self.cached: dict[str | None, set[str]] = {}

    async def load(self, llm: Any, update: StagedUpdate) -> float:
        if self.refused:
            raise WeightsRefused("not this model's")
        if update.spec.kv == "recompute":
            self.cached.clear()
        self.loaded = update.version
        return 0.1


class Bench:
    """The engine with fakes around it. `ask` has a prompt sampled, and returns which weights had cached what it may meet."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = Weights()
        plain = SimpleNamespace(grammar=lambda job: None, stop_ids=frozenset(), is_tekken=False)
        monkeypatch.setattr(module, "VllmFormat", lambda *_: plain)
        monkeypatch.setattr(module, "one_grammar_backend", lambda *_, **__: None)
        monkeypatch.setattr(module, "VllmWeights", lambda *_: self.weights)
        monkeypatch.setattr(module, "VllmLoad", lambda config: None)
        monkeypatch.setattr(module, "sampling_params", lambda *_: None)
        monkeypatch.setattr(module, "steps_of", lambda *_, **__: [])
        monkeypatch.setattr(module, "VersionSpans", lambda *_: SimpleNamespace(sampled=lambda: 0))
        chosen = SimpleNamespace(take=lambda trial_id: None, release=lambda rank: None)
        monkeypatch.setattr(module, "CacheRanks", lambda *_: chosen)
        monkeypatch.setattr(module, "tokens_input", lambda ids, cache_salt: cache_salt)
        config = SimpleNamespace(
            lora_config=None,
            model_config=SimpleNamespace(max_model_len=100),
            structured_outputs_config=None,
            parallel_config=SimpleNamespace(data_parallel_size=1, local_engines_only=False),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        args = SimpleNamespace(engine=SimpleNamespace(create_engine_config=lambda: config))
        args.checked = lambda: args
        self.engine = module.VllmTokens(args)
        self.engine._llm = SimpleNamespace(generate=self._generate)
        self.salts: Counter[str | None] = Counter()

    async def _generate(self, salt: str | None, *_: Any, **__: Any) -> Any:
        self.salts[salt] += 1
        cached = self.weights.cached.setdefault(salt, set())
        self.met = set(cached)
        cached.add(self.weights.loaded)
        yield None

    async def load(self, step: int, kv: str) -> None:
        made = spec(manifest_of(two_shards()), step, kv=kv)
        await self.engine.load_weights(StagedUpdate(f"update-{step}", made, Path()))

    async def ask(self) -> set[str]:
        async for _ in self.engine.sample("r", [1, 2, 3], Sampling(max_tokens=1), Job()):
            pass
        return self.met


@pytest.fixture
def bench(engine_module: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(engine_module, monkeypatch)


async def test_weights_that_come_again_meet_nothing_of_those_that_were_gone_back_to(bench: Bench) -> None:
    await bench.load(1, "recompute")
    assert await bench.ask() == set() and await bench.ask() == {bench.engine.version}
    await bench.load(2, "keep")
    assert await bench.ask() == set()
    await bench.load(1, "recompute")  # the score of the new ones failed: the worker goes back
    assert await bench.ask() == set()
    await bench.load(2, "keep")
    assert await bench.ask() == set(), "nothing of other weights, since no token says so"
    assert await bench.ask() == {bench.engine.version}


@pytest.mark.parametrize("kinds", ["kkkk", "rrrr", "krkr", "rkrk", "kkrr"])
async def test_new_prompts_meet_only_what_the_weights_now_loaded_have_cached(bench: Bench, kinds: str) -> None:
    for number, kind in enumerate(kinds):
        await bench.load(number % 2, {"k": "keep", "r": "recompute"}[kind])
        assert await bench.ask() == set()
        assert await bench.ask() == {bench.engine.version}
    assert set(bench.salts.values()) == {2}, "a salt for each load"


async def test_weights_that_are_refused_change_nothing_of_the_cache(bench: Bench) -> None:
    await bench.load(1, "keep")
    await bench.ask()
    bench.weights.refused = True
    with pytest.raises(WeightsRefused):
        await bench.load(2, "keep")
    assert await bench.ask() == {bench.engine.version}, "what it had cached is still its own"
