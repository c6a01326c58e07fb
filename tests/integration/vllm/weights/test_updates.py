"""New weights in the real engine: what it says by them is what transformers says by them, and every token knows which it is of.

The model's head is tied to its embedding: on a CPU that is the one layer that nothing rebuilds by itself.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, EngineFailed, WeightsRefused
from steno.contracts.policy import UpdateSpec
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.interfaces import StagedUpdate
from tests.integration.vllm.drawing import Drawn, ask, draw, gathered, logits_of, to_the_end
from tests.integration.vllm.model import CONTEXT_TOKENS, make
from tests.support.weights.trained import checkpoint, export, logprobs_of, perturbed, update_of

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
    }
    tokens = VllmTokens(from_fields(fields))
    await tokens.start()
    yield tokens
    await tokens.stop()


class Pushed:
    """Models pushed so far, by version."""

    def __init__(self, engine: VllmTokens, model_dir: Path, folder: Path) -> None:
        self.engine = engine
        self.models = {"base/0": perturbed(model_dir, 0, scale=0.0)}
        self._model_dir = model_dir
        self._folder = folder

    def spec(self, step: int, **fields: object) -> UpdateSpec:
        model = perturbed(self._model_dir, step)
        self.models[f"run/{step}"] = model
        return update_of(model, self._folder / f"w{step}", step, **fields)

    async def push(self, step: int, **fields: object) -> float:
        return await self.load(self.spec(step, **fields))

    async def load(self, spec: UpdateSpec) -> float:
        return await self.engine.load_weights(staged(spec))


def staged(spec: UpdateSpec) -> StagedUpdate:
    return StagedUpdate(f"update-{spec.step}", spec, Path(spec.location))


@pytest.fixture(scope="module")
def pushed(engine: VllmTokens, tied_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    return Pushed(engine, tied_dir, tmp_path_factory.mktemp("pushed"))


def wanted(model: PreTrainedModel, drawn: Drawn) -> list[float]:
    return gathered(torch.log_softmax(logits_of(model, drawn), -1), drawn.ids)


async def test_what_is_said_by_new_weights_is_what_transformers_says(engine: VllmTokens, pushed: Pushed) -> None:
    ids = ask(engine, "a question of some length")
    for step in (1, 2):
        assert await pushed.push(step) > 0
        new = pushed.models[f"run/{step}"]
        assert engine.card().policy_version == f"run/{step}"
        assert await engine.score(ids) == pytest.approx(logprobs_of(new, ids), abs=1e-3)
        drawn = await draw(engine, ask(engine, PROMPT), Sampling(max_tokens=60, ignore_eos=True))
        assert {one.version for one in drawn.steps} == {f"run/{step}"}
        assert drawn.logprobs == pytest.approx(wanted(new, drawn), abs=1e-3)
        assert (
            max(abs(a - b) for a, b in zip(drawn.logprobs, wanted(pushed.models["base/0"], drawn), strict=True)) > 0.1
        )


async def test_a_generation_across_two_updates_is_of_three_models_each_token_of_its_own(
    engine: VllmTokens, pushed: Pushed
) -> None:
    await pushed.push(3)
    specs = [pushed.spec(step) for step in (4, 5)]  # here: it takes long, and the engine goes on meanwhile
    drawn = [Drawn(ask(engine, PROMPT)), Drawn(ask(engine, "another"))]

    async def follow(one: Drawn, name: str) -> None:
        async for step in engine.sample(name, one.prompt_ids, to_the_end(one), Job()):
            one.steps.append(step)

    running = [asyncio.create_task(follow(one, f"across-{index}")) for index, one in enumerate(drawn)]
    for spec in specs:
        before = [len(one.ids) for one in drawn]
        async with asyncio.timeout(120):
            while any(len(one.ids) < had + 5 for one, had in zip(drawn, before, strict=True)):
                await asyncio.sleep(0.01)
        await pushed.load(spec)
    await asyncio.gather(*running)
    for one in drawn:
        versions = [step.version for step in one.steps for _ in step.ids]
        assert versions == sorted(versions) and set(versions) == {"run/3", "run/4", "run/5"}
        by_version = {version: wanted(pushed.models[version], one) for version in set(versions)}
        expected = [by_version[version][index] for index, version in enumerate(versions)]
        assert one.logprobs == pytest.approx(expected, abs=1e-3)


async def test_keep_leaves_nothing_of_the_old_weights_to_new_requests(engine: VllmTokens, pushed: Pushed) -> None:
    prompt, across = ask(engine, PROMPT), Drawn(ask(engine, "another"))
    await draw(engine, prompt, Sampling(max_tokens=8))
    before, spec = engine.version, pushed.spec(6, kv="keep")

    async def follow() -> None:
        async for step in engine.sample("kept", across.prompt_ids, to_the_end(across), Job()):
            across.steps.append(step)

    running = asyncio.create_task(follow())
    async with asyncio.timeout(120):
        while len(across.ids) < 5:
            await asyncio.sleep(0.01)
    await pushed.load(spec)
    await running
    assert {(step.version, step.mixed_kv) for step in across.steps} == {(before, False), ("run/6", True)}
    for cached in (False, True):
        drawn = await draw(engine, prompt, Sampling(max_tokens=40, ignore_eos=True))
        assert (drawn.steps[0].cached_tokens > 0) is cached
        assert drawn.logprobs == pytest.approx(wanted(pushed.models["run/6"], drawn), abs=1e-3)
        assert not any(step.mixed_kv for step in drawn.steps)


async def test_weights_that_come_again_meet_nothing_of_those_that_were_gone_back_to(
    engine: VllmTokens, pushed: Pushed
) -> None:
    """What is cached between the two is of other weights, and no token would say so (I10)."""
    prompt, before, again = ask(engine, PROMPT), pushed.spec(11), pushed.spec(12, kv="keep")
    for spec in (before, again, before):
        await pushed.load(spec)
        await draw(engine, prompt, Sampling(max_tokens=8))
    await pushed.load(again)
    drawn = await draw(engine, prompt, Sampling(max_tokens=40, ignore_eos=True))
    assert drawn.steps[0].cached_tokens == 0
    assert drawn.logprobs == pytest.approx(wanted(pushed.models["run/12"], drawn), abs=1e-3)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "head", "gone", "nccl", "rank"])
async def test_what_is_refused_leaves_the_old_weights_as_they_were(
    engine: VllmTokens, pushed: Pushed, tmp_path: Path, fault: str
) -> None:
    before, version = await engine.score([5, 6, 7, 8]), engine.version
    tensors = checkpoint(pushed.models["base/0"])
    norm, named = "model.norm.weight", "tensor 'model.norm.weight'"
    if fault == "missing":
        del tensors[norm]
    elif fault == "unknown":
        tensors["model.extra"], named = torch.zeros(2), "tensor 'model.extra'"
    elif fault == "shape":
        tensors[norm] = torch.zeros(3)
    elif fault == "dtype":
        tensors[norm] = tensors[norm].long()
    elif fault == "head":
        tensors["lm_head.weight"], named = torch.zeros(512, 64), "tensor 'lm_head.weight' is the same tensor as"
    spec = update_of(pushed.models["base/0"], tmp_path, 9).model_copy(update={"manifest": export(tensors, tmp_path)})
    if fault == "gone":
        shutil.rmtree(tmp_path)
        named = "can't be read"
    elif fault == "nccl":
        spec, named = spec.model_copy(update={"transport": "nccl", "location": "{}"}), "location: no rendezvous"
    elif fault == "rank":
        meeting = '{"master_address": "host", "master_port": 1, "world_size": 2, "rank_offsets": {"other": 1}}'
        spec, named = spec.model_copy(update={"transport": "nccl", "location": meeting}), "no worker 'worker'"
    with pytest.raises(WeightsRefused, match=named):
        await engine.load_weights(staged(spec))
    assert await engine.score([5, 6, 7, 8]) == pytest.approx(before, abs=1e-6)
    assert (engine.healthy, engine.version) == (True, version)


async def test_a_head_that_is_given_beside_its_embedding_is_the_same(
    engine: VllmTokens, pushed: Pushed, tmp_path: Path
) -> None:
    model = perturbed(pushed._model_dir, 7)
    tensors = {**checkpoint(model), "lm_head.weight": model.lm_head.weight.detach().clone()}
    spec = update_of(model, tmp_path, 7).model_copy(update={"manifest": export(tensors, tmp_path)})
    await engine.load_weights(staged(spec))
    assert await engine.score([5, 6, 7, 8]) == pytest.approx(logprobs_of(model, [5, 6, 7, 8]), abs=1e-3)


async def test_ids_that_can_not_be_scored_are_refused(engine: VllmTokens) -> None:
    for ids in ([5, 10**6], [5] * (CONTEXT_TOKENS + 1)):
        with pytest.raises(BadRequest):
            await engine.score(ids)


async def test_a_load_that_fails_half_way_is_the_engines_death(
    engine: VllmTokens, pushed: Pushed, tmp_path: Path
) -> None:
    """Runs last: what is then in the engine's processes is of no version, so nothing may be sampled by it."""
    spec = update_of(pushed.models["base/0"], tmp_path, 10)
    tensors = checkpoint(pushed.models["base/0"])
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
    export(tensors, tmp_path)  # after they were checked
    running = asyncio.create_task(draw(engine, ask(engine, "nice"), Sampling(max_tokens=1500, ignore_eos=True)))
    with pytest.raises(EngineFailed, match="failed while it loaded run/10"):
        await engine.load_weights(staged(spec))
    assert not engine.healthy
    with pytest.raises(EngineFailed):
        engine.load()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
