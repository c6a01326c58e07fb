"""New weights in the embedded engine, from a folder to the tokens that a stream sends (I1, I10)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from steno.contracts.chat import Job, Sampling
from steno.contracts.policy import UpdateSpec
from steno.contracts.records import bytes_to_floats, bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Apply, Delta, Failed, Finish, Frame, Generate, Prepare, Progress, Started
from steno.models import TINY
from steno_worker.engines.transformers.engine import build
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay.generations import Generations
from steno_worker.weights.update_runner import UpdateRunner
from tests.support.weights.trained import checkpoint, export, logprobs_of, perturbed, update_of
from tests.support.workers.outlet import Outlet


class Worker:
    """The embedded engine, its updates and the streams of one proxy, without the socket."""

    def __init__(self, staging: Path, model: Path = TINY) -> None:
        fields = {"model": str(model), "policy": "default", "max_streams": 8, "context_tokens": None, "engine_args": []}
        self.engine = build(SimpleNamespace(**fields))  # type: ignore[arg-type]
        metrics = WorkerMetrics(CollectorRegistry())
        self.updates = UpdateRunner(self.engine, metrics, announce=lambda: None, staging_dir=staging)
        self.streams = Generations(self.engine, Outlet(self.send), metrics, lambda: None, self.updates.gate)
        self.frames: list[Frame] = []
        self._told = asyncio.Event()

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._told.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self._told.clear()
                await self._told.wait()

    async def update(self, spec: UpdateSpec) -> Progress:
        """Prepared and applied; the last word on it."""
        name = f"update-{spec.step}-{len(self.frames)}"
        self.updates.handle(Prepare(name, spec.model_dump_json().encode()), self.send)

        def told(*states: str) -> Progress | None:
            own = [frame for frame in self.frames if isinstance(frame, Progress) and frame.update_id == name]
            return own[-1] if own and own[-1].state in states else None

        await self.until(lambda: told("ready", "failed"))
        if told("ready"):
            self.updates.handle(Apply(name), self.send)
            await self.until(lambda: told("served", "failed"))
        last = told("served", "failed")
        assert last is not None
        return last

    def generate(self, stream: int, prompt: list[int], tokens: int) -> None:
        law = Sampling(max_tokens=tokens, ignore_eos=True, seed=stream)
        job = Job(prompt_ids=ids_to_bytes(prompt), sampling=law)
        self.streams.handle(Generate(stream, f"{stream:012x}", 1, "trial", job, window_tokens=10**6))

    async def ended(self, stream: int) -> Finish | Failed:
        """How a generation ended. Others may say something at any time, so that its end need not be the last frame."""

        def ends() -> list[Finish | Failed]:
            return [frame for frame in self.frames if isinstance(frame, Finish | Failed) and frame.stream == stream]

        await self.until(ends)
        return ends()[0]

    def tokens(self, stream: int) -> int:
        return sum(len(frame.ids) // 4 for frame in self.deltas(stream))

    def deltas(self, stream: int) -> list[Delta]:
        return [frame for frame in self.frames if isinstance(frame, Delta) and frame.stream == stream]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    one = Worker(tmp_path / "staging")
    await one.engine.start()
    yield one
    await asyncio.gather(*one.streams.abandon())
    await one.updates.close()
    await one.engine.stop()


async def test_a_generation_across_two_updates_is_of_three_models_each_token_of_its_own(
    worker: Worker, tmp_path: Path
) -> None:
    models = [perturbed(TINY, 0, scale=0.0), perturbed(TINY, 1), perturbed(TINY, 2)]
    updates = [update_of(models[step], tmp_path / f"w{step}", step) for step in (1, 2)]
    prompts = [[5, 6, 7, 8 + stream] for stream in range(3)]
    for stream, prompt in enumerate(prompts, 1):
        worker.generate(stream, prompt, 1500)
    for update in updates:
        before = worker.tokens(1)
        await worker.until(lambda before=before: worker.tokens(1) > before + 20)
        assert (await worker.update(update)).state == "served"
    await worker.until(lambda: sum(isinstance(frame, Finish) for frame in worker.frames) == 3)
    for stream, prompt in enumerate(prompts, 1):
        deltas = worker.deltas(stream)
        ids = [token for delta in deltas for token in bytes_to_ids(delta.ids)]
        logprobs = [value for delta in deltas for value in bytes_to_floats(delta.logprobs)]
        versions = [delta.version for delta in deltas for _ in bytes_to_ids(delta.ids)]
        assert sorted(set(versions)) == ["base/0", "run/1", "run/2"] and versions == sorted(versions)
        wanted = [logprobs_of(model, prompt + ids)[len(prompt) - 1 :] for model in models]
        by_version = dict(zip(("base/0", "run/1", "run/2"), wanted, strict=True))
        assert logprobs == pytest.approx([by_version[version][i] for i, version in enumerate(versions)], abs=1e-3)
    assert worker.updates.cards()[0].policy_version == "run/2"


async def test_keep_goes_on_with_the_cache_that_the_old_weights_made(worker: Worker, tmp_path: Path) -> None:
    new = perturbed(TINY, 1)
    update = update_of(new, tmp_path / "w", 1, kv="keep")
    worker.generate(1, [5, 6, 7], 1500)
    await worker.until(lambda: worker.tokens(1) > 20)
    assert (await worker.update(update)).state == "served"
    assert isinstance(await worker.ended(1), Finish)
    worker.generate(2, [5, 6, 7], 20)
    assert isinstance(await worker.ended(2), Finish)

    def off(stream: int) -> float:
        deltas = worker.deltas(stream)
        ids = [token for delta in deltas for token in bytes_to_ids(delta.ids)]
        logprobs = [value for delta in deltas for value in bytes_to_floats(delta.logprobs)]
        first = sum(len(delta.ids) // 4 for delta in deltas if delta.version == "base/0")
        wanted = logprobs_of(new, [5, 6, 7, *ids])[2:]
        return max(abs(a - b) for a, b in zip(logprobs[first:], wanted[first:], strict=True))

    assert off(1) > 1e-2  # of a mixed cache
    assert off(2) < 1e-3  # a new request has nothing of the old
    assert {(delta.version, delta.mixed_kv) for delta in worker.deltas(1)} == {("base/0", False), ("run/1", True)}
    assert {(delta.version, delta.mixed_kv) for delta in worker.deltas(2)} == {("run/1", False)}


def damaged(folder: Path) -> None:
    path = folder / "model-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def respecified(spec: UpdateSpec, tensors: dict[str, torch.Tensor], folder: Path) -> UpdateSpec:
    return spec.model_copy(update={"manifest": export(tensors, folder)})


@pytest.mark.parametrize("fault", ["corrupt", "missing", "unknown", "shape", "dtype", "nan", "wrong"])
async def test_weights_that_are_not_what_they_should_be_are_refused_and_the_old_ones_go_on(
    worker: Worker, tmp_path: Path, fault: str
) -> None:
    model = perturbed(TINY, 1)
    tensors, folder = checkpoint(model), tmp_path / "w"
    spec = update_of(model, folder, 1)
    norm = "model.norm.weight"
    if fault == "corrupt":
        damaged(folder)
        named = "shard model-00001.safetensors"
    elif fault == "missing":
        del tensors[norm]
        named = f"tensor '{norm}' is missing"
    elif fault == "unknown":
        tensors["model.extra"] = torch.zeros(2)
        named = "tensor 'model.extra' is not of this model"
    elif fault == "shape":
        tensors[norm] = torch.zeros(3)
        named = f"tensor '{norm}' has shape [3]"
    elif fault == "dtype":
        tensors[norm] = tensors[norm].long()
        named = f"tensor '{norm}' has dtype int64"
    elif fault == "nan":
        tensors[norm][0] = torch.nan
        spec = spec.model_copy(update={"probe": None})
        named = f"tensor '{norm}' has NaN or infinite values"
    else:  # other weights than the probe is of
        tensors[norm] = tensors[norm] * 2
        named = "probe: log-probabilities differ"
    if fault != "corrupt":
        spec = respecified(spec, tensors, folder)
    worker.generate(1, [5, 6, 7], 3000)
    await worker.until(lambda: worker.tokens(1) > 5)
    last = await worker.update(spec)
    assert (last.state, last.code) == ("failed", "weights_refused")
    assert named in last.message
    assert worker.updates.cards()[0].policy_version == "base/0"
    if fault == "wrong":  # loaded, and not what was said: nothing sampled by them may leave
        assert isinstance(await worker.ended(1), Failed)
        assert {delta.version for delta in worker.deltas(1)} == {"base/0"}
        async with worker.updates._loading:  # until it has gone back to what it was started from
            assert worker.updates.healthy
        worker.generate(2, [5, 6, 7], 5)
        assert isinstance(await worker.ended(2), Finish)
        ids = [token for delta in worker.deltas(2) for token in bytes_to_ids(delta.ids)]
        logprobs = [value for delta in worker.deltas(2) for value in bytes_to_floats(delta.logprobs)]
        assert {delta.version for delta in worker.deltas(2)} == {"base/0"}
        wanted = logprobs_of(perturbed(TINY, 0, scale=0.0), [5, 6, 7, *ids])[2:]
        assert logprobs == pytest.approx(wanted, abs=1e-3)
    else:
        before = worker.tokens(1)
        await worker.until(lambda: worker.tokens(1) > before + 5)
        assert {delta.version for delta in worker.deltas(1)} == {"base/0"}
        assert worker.updates.healthy
    good = update_of(model, tmp_path / "good", 2)
    assert (await worker.update(good)).state == "served"
    assert worker.updates.healthy
    worker.generate(9, [5, 6, 7], 5)
    assert isinstance(await worker.ended(9), Finish)
    assert {delta.version for delta in worker.deltas(9)} == {"run/2"}
    assert any(isinstance(frame, Started) and frame.stream == 9 for frame in worker.frames)


async def test_bfloat16_weights_are_loaded_as_the_model_computes(worker: Worker, tmp_path: Path) -> None:
    model = perturbed(TINY, 1)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint(model).items()}
    model.load_state_dict({name: tensor.float() for name, tensor in rounded.items()}, strict=False)
    spec = respecified(update_of(model, tmp_path / "w", 1), rounded, tmp_path / "w")
    assert (await worker.update(spec)).state == "served"


def mixture(folder: Path) -> Path:
    """DeepSeek V3, with the tiny model's tokenizer and template. Its file has a layer that predicts further tokens as well,
    which transformers passes over."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=1019, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        max_position_embeddings=512, eos_token_id=1012, pad_token_id=1010, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "model.layers.61.norm.weight": torch.ones(32)}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


async def test_experts_come_one_by_one_as_a_checkpoint_has_them(tmp_path: Path) -> None:
    """transformers has them fused. A trainer sends checkpoints' names, and the way back to the base has them too."""
    folder = mixture(tmp_path / "model")
    base, model = perturbed(folder, 0, scale=0.0), perturbed(folder, 1)
    model.save_pretrained(tmp_path / "sent")
    tensors = load_file(tmp_path / "sent" / "model.safetensors")
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in tensors
    good = respecified(update_of(model, tmp_path / "w1", 1), tensors, tmp_path / "w1")
    tensors = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2}
    wrong = respecified(update_of(model, tmp_path / "w2", 1), tensors, tmp_path / "w2")
    del tensors["model.layers.1.mlp.experts.0.gate_proj.weight"]
    short = respecified(update_of(model, tmp_path / "w3", 1), tensors, tmp_path / "w3")
    worker = Worker(tmp_path / "staging", folder)
    await worker.engine.start()
    last = await worker.update(short)
    assert "'model.layers.1.mlp.experts.0.gate_proj.weight' is missing" in last.message
    last = await worker.update(wrong)
    assert last.state == "failed" and "probe: log-probabilities differ" in last.message
    for stream, (version, wanted) in enumerate((("base/0", base), ("run/1", model)), 1):
        if version == "run/1":
            assert (await worker.update(good)).state == "served"
        else:
            async with worker.updates._loading:  # until it has gone back to what it was started from
                assert worker.updates.healthy
        worker.generate(stream, [5, 6, 7], 20)
        assert isinstance(await worker.ended(stream), Finish)
        deltas = worker.deltas(stream)
        ids = [token for delta in deltas for token in bytes_to_ids(delta.ids)]
        logprobs = [value for delta in deltas for value in bytes_to_floats(delta.logprobs)]
        assert {delta.version for delta in deltas} == {version}
        assert logprobs == pytest.approx(logprobs_of(wanted, [5, 6, 7, *ids])[2:], abs=1e-3)
    await worker.updates.close()
    await worker.engine.stop()
