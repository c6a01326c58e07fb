"""A LoRA adapter into the real engine, in place of the one before: what it says by each is what peft says, with the cache of
prompts on, and every token knows which it is of."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import ConfigError, WeightsRefused
from steno.contracts.policy import AdapterEntry, UpdateSpec
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.interfaces import StagedUpdate
from steno_worker.temporary import TemporaryFolder
from steno_worker.weights.adapter import Adapter
from steno_worker.weights.proven_weights import base_update
from tests.integration.vllm.drawing import Drawn, ask, draw, gathered, logits_of, to_the_end
from tests.integration.vllm.model import CONTEXT_TOKENS, make
from tests.support.weights.adapted import adapted, adapter_update
from tests.support.weights.trained import logprobs_of, perturbed, update_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "a question that is long enough to fill several blocks of the cache, and then some more of it " * 3


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tied"), tied=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(tied_dir: Path) -> AsyncIterator[VllmTokens]:
    fields = {
        "model": str(tied_dir),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
    }
    tokens = VllmTokens(from_fields(fields))
    await tokens.start()
    yield tokens
    await tokens.stop()


class Adapters:
    """Models as adapted so far, by version."""

    def __init__(self, engine: VllmTokens, model_dir: Path, folder: Path) -> None:
        self.engine = engine
        self.model_dir = model_dir
        self.models: dict[str, PreTrainedModel] = {"base/0": perturbed(model_dir, 0, scale=0.0)}
        self._folder = folder

    def spec(self, step: int, **fields: object) -> UpdateSpec:
        model = self.models[f"run/{step}"] = adapted(self.model_dir, step)
        return adapter_update(self.model_dir, model, self._folder / f"a{step}", step, **fields)

    async def push(self, step: int, **fields: object) -> float:
        return await self.load(self.spec(step, **fields))

    async def load(self, spec: UpdateSpec) -> float:
        return await self.engine.load_weights(staged(spec))

    def wanted(self, drawn: Drawn, version: str) -> list[float]:
        return gathered(torch.log_softmax(logits_of(self.models[version], drawn), -1), drawn.ids)


def staged(spec: UpdateSpec) -> StagedUpdate:
    return StagedUpdate(f"update-{spec.step}", spec, Path(spec.location))


@pytest.fixture(scope="module")
def adapters(engine: VllmTokens, tied_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(engine, tied_dir, tmp_path_factory.mktemp("adapters"))


async def follow(engine: VllmTokens, one: Drawn, name: str) -> None:
    async for step in engine.sample(name, one.prompt_ids, to_the_end(one), Job()):
        one.steps.append(step)


async def until(drawn: list[Drawn], more: int) -> None:
    before = [len(one.ids) for one in drawn]
    async with asyncio.timeout(120):
        while any(len(one.ids) < had + more for one, had in zip(drawn, before, strict=True)):
            await asyncio.sleep(0.01)


async def test_a_request_in_flight_goes_on_by_each_adapter_that_comes(engine: VllmTokens, adapters: Adapters) -> None:
    """The first one comes while the engine samples by the model alone. The probe is asked while others sample."""
    drawn = [Drawn(ask(engine, PROMPT)), Drawn(ask(engine, "another"))]
    specs = [adapters.spec(step) for step in (1, 2)]  # here: it takes long, and the engine goes on meanwhile
    running = [asyncio.create_task(follow(engine, one, f"across-{index}")) for index, one in enumerate(drawn)]
    for step, spec in enumerate(specs, 1):
        await until(drawn, 5)
        await adapters.load(spec)
        assert await engine.score([5, 6, 7, 8, 9]) == pytest.approx(
            logprobs_of(adapters.models[f"run/{step}"], [5, 6, 7, 8, 9]), abs=1e-3
        )
    await asyncio.gather(*running)
    for one in drawn:
        versions = [step.version for step in one.steps for _ in step.ids]
        assert versions == sorted(versions) and set(versions) == {"base/0", "run/1", "run/2"}
        by_version = {version: adapters.wanted(one, version) for version in set(versions)}
        assert one.logprobs == pytest.approx([by_version[v][i] for i, v in enumerate(versions)], abs=1e-3)


async def test_the_same_prompt_is_said_by_the_newest_adapter_also_from_the_cache(
    engine: VllmTokens, adapters: Adapters
) -> None:
    prompt = ask(engine, PROMPT)
    for step in (3, 4):
        assert await adapters.push(step) > 0
        assert engine.card().policy_version == f"run/{step}"
        for cached in (False, True):
            drawn = await draw(engine, prompt, Sampling(max_tokens=40, ignore_eos=True))
            assert {one.version for one in drawn.steps} == {f"run/{step}"}
            assert (drawn.steps[0].cached_tokens > 0) is cached
            assert drawn.logprobs == pytest.approx(adapters.wanted(drawn, f"run/{step}"), abs=1e-3)
        before = adapters.wanted(drawn, "base/0")
        assert max(abs(a - b) for a, b in zip(drawn.logprobs, before, strict=True)) > 0.1


async def test_keep_leaves_nothing_of_the_old_adapter_to_new_requests(engine: VllmTokens, adapters: Adapters) -> None:
    prompt, across = ask(engine, PROMPT), Drawn(ask(engine, "another"))
    await draw(engine, prompt, Sampling(max_tokens=8))
    before, spec = engine.version, adapters.spec(5, kv="keep")
    running = asyncio.create_task(follow(engine, across, "kept"))
    await until([across], 5)
    await adapters.load(spec)
    await running
    assert {(step.version, step.mixed_kv) for step in across.steps} == {(before, False), ("run/5", True)}
    for cached in (False, True):
        drawn = await draw(engine, prompt, Sampling(max_tokens=40, ignore_eos=True))
        assert (drawn.steps[0].cached_tokens > 0) is cached
        assert drawn.logprobs == pytest.approx(adapters.wanted(drawn, "run/5"), abs=1e-3)


async def test_the_engine_goes_back_to_the_model_alone(engine: VllmTokens, adapters: Adapters, tied_dir: Path) -> None:
    base = base_update(tied_dir, engine.card())
    assert base is not None
    await engine.load_weights(base)
    drawn = await draw(engine, ask(engine, PROMPT), Sampling(max_tokens=20, ignore_eos=True))
    assert drawn.logprobs == pytest.approx(adapters.wanted(drawn, "base/0"), abs=1e-3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rank", "adapter.rank: got 16, this engine was started for 8 at most (--max-lora-rank)"),
        ("base", "start it from the trainer's `model`"),
        ("target", "layers up_proj are adapted; this engine was started for q_proj, k_proj, v_proj, down_proj"),
        ("whole", "got weights of a whole model; this engine was started with --enable-lora"),
        ("layer", "is of a layer that this model does not have"),
        ("half", "lora_B.weight' is missing"),
    ],
)
async def test_what_is_refused_leaves_the_adapter_as_it_was(
    engine: VllmTokens, adapters: Adapters, tied_dir: Path, tmp_path: Path, fault: str, said: str
) -> None:
    await adapters.push(6)
    before = await engine.score([5, 6, 7, 8])
    rank = 16 if fault == "rank" else 4
    model = adapted(tied_dir, 9, rank=rank, targets=("up_proj",) if fault == "target" else ("q_proj",))
    spec = adapter_update(tied_dir, model, tmp_path, 9, rank=rank)
    if fault == "base":
        entry = AdapterEntry(base="0" * 32, rank=4, alpha=8)
        spec = spec.model_copy(update={"manifest": spec.manifest.model_copy(update={"adapter": entry})})
    elif fault == "whole":
        spec = update_of(adapters.models["base/0"], tmp_path / "whole", 9)
    elif fault in ("layer", "half"):
        spec = renamed(spec, tmp_path / "other", "layers.1" if fault == "layer" else "", fault)
    with pytest.raises(WeightsRefused) as refused:
        await engine.load_weights(staged(spec))
    assert said in refused.value.message
    assert (engine.healthy, engine.version) == (True, "run/6")
    assert await engine.score([5, 6, 7, 8]) == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no room", "adapter: can't be written to"),
        ("damaged", "adapter: vLLM refuses it"),
        ("passed over", "is of a layer that vLLM can't adapt"),
    ],
)
async def test_what_fails_before_the_adapter_is_there_leaves_the_one_before(
    engine: VllmTokens, adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, said: str
) -> None:
    await adapters.push(7)
    assert engine._adapter is not None
    if fault == "no room":
        (tmp_path / "a file").touch()
        monkeypatch.setattr(engine._adapter, "_root", tmp_path / "a file")
    elif fault == "damaged":
        write = engine._adapter._write

        def damaged(adapter: Adapter) -> Path:
            folder = write(adapter)
            (folder / "adapter_config.json").write_text('{"r": 512, "lora_alpha": 1, "target_modules": ["q_proj"]}')
            return folder

        monkeypatch.setattr(engine._adapter, "_write", damaged)
    else:  # where a user names words that are also of layers which vLLM does not wrap
        monkeypatch.setattr(engine._adapter, "_targets", ["up_proj"])
    spec = adapter_update(
        adapters.model_dir, adapted(adapters.model_dir, 8, targets=("up_proj",) if fault == "passed over" else ("q_proj",)),
        tmp_path / "a8", 8,
    )  # fmt: skip
    with pytest.raises(WeightsRefused, match=said):
        await engine.load_weights(staged(spec))
    assert (engine.healthy, engine.version) == (True, "run/7")
    drawn = await draw(engine, ask(engine, "another"), Sampling(max_tokens=20, ignore_eos=True))
    assert drawn.logprobs == pytest.approx(adapters.wanted(drawn, "run/7"), abs=1e-3)


def renamed(spec: UpdateSpec, folder: Path, layer: str, fault: str) -> UpdateSpec:
    """With a layer of another name, or without one half of a layer."""
    from safetensors.torch import load_file

    from tests.support.weights.trained import export

    tensors = {
        name: tensor
        for shard in spec.manifest.shards
        for name, tensor in load_file(Path(spec.location) / shard.name).items()
    }
    if fault == "half":
        del tensors[next(name for name in tensors if "lora_B" in name)]
    else:
        tensors = {name.replace(layer, "layers.7"): tensor for name, tensor in tensors.items()}
    manifest = export(tensors, folder).model_copy(update={"adapter": spec.manifest.adapter})
    return spec.model_copy(update={"manifest": manifest, "location": str(folder)})


async def test_an_engine_without_adapters_says_how_to_start_one(
    tokens: VllmTokens, model_dir: Path, tmp_path: Path
) -> None:
    spec = adapter_update(model_dir, adapted(model_dir, 1), tmp_path, 1)
    with pytest.raises(WeightsRefused, match="start it with --enable-lora --max-lora-rank RANK, RANK at least 4"):
        await tokens.load_weights(staged(spec))


def test_layers_are_named_where_nothing_is_said_and_what_can_not_be_is_refused(tied_dir: Path) -> None:
    named = from_fields({"model": str(tied_dir), "enable_lora": True}).checked().engine.lora_target_modules
    assert named is not None and {"q_proj", "down_proj"} < set(named) and "lm_head" not in named
    with pytest.raises(ConfigError, match="enable_lora: got data_parallel_size 2, must be 1"):
        VllmTokens(from_fields({"model": str(tied_dir), "enable_lora": True, "data_parallel_size": 2}))
    fields = {"model": str(tied_dir), "enable_lora": True, "lora_target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ConfigError, match="lora_target_modules: lm_head can't be adapted here"):
        from_fields(fields).checked()


def test_a_worker_removes_the_adapters_of_a_killed_one_before_it_starts(
    tied_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = TemporaryFolder("adapter")
    assert killed._held is not None
    killed._held.close()
    fields = {"model": str(tied_dir), "dtype": "float32", "max_model_len": CONTEXT_TOKENS, "enable_lora": True}
    adapter = VllmTokens(from_fields(fields))._adapter
    assert adapter is not None and not killed.path.exists()
    assert [path for path in tmp_path.glob("steno-*") if path.is_dir()] == [adapter._root]
    adapter.close()
    assert list(tmp_path.glob("steno-*")) == []
