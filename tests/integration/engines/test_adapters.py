"""A LoRA adapter in the embedded engine, from a folder to the tokens that a stream sends (I1, I10)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from steno.contracts.policy import AdapterEntry, UpdateSpec
from steno.contracts.records import bytes_to_floats, bytes_to_ids
from steno.contracts.wire.frames import Finish
from steno.models import TINY
from tests.integration.engines.test_updates import Worker, worker  # noqa: F401  # a fixture
from tests.support.weights.adapted import adapted, adapter_update
from tests.support.weights.trained import logprobs_of, perturbed, update_of


async def test_a_generation_across_two_adapters_is_of_three_models_each_token_of_its_own(
    worker: Worker,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Weights of a whole model come between the two: the second adapter goes onto the checkpoint, not onto them."""
    models = [perturbed(TINY, 0, scale=0.0), adapted(TINY, 1), perturbed(TINY, 2), adapted(TINY, 3)]
    updates = [
        adapter_update(TINY, models[1], tmp_path / "w1", 1),
        update_of(models[2], tmp_path / "w2", 2),
        adapter_update(TINY, models[3], tmp_path / "w3", 3),
    ]
    prompt = [5, 6, 7, 8]
    worker.generate(1, prompt, 1500)
    for update in updates:
        before = worker.tokens(1)
        await worker.until(lambda before=before: worker.tokens(1) > before + 20)
        assert (await worker.update(update)).state == "served"
    await worker.until(lambda: any(isinstance(frame, Finish) for frame in worker.frames))
    deltas = worker.deltas(1)
    ids = [token for delta in deltas for token in bytes_to_ids(delta.ids)]
    logprobs = [value for delta in deltas for value in bytes_to_floats(delta.logprobs)]
    versions = [delta.version for delta in deltas for _ in bytes_to_ids(delta.ids)]
    assert sorted(set(versions)) == ["base/0", "run/1", "run/2", "run/3"] and versions == sorted(versions)
    wanted = [logprobs_of(model, prompt + ids)[len(prompt) - 1 :] for model in models]
    by_version = dict(zip(("base/0", "run/1", "run/2", "run/3"), wanted, strict=True))
    assert logprobs == pytest.approx([by_version[version][i] for i, version in enumerate(versions)], abs=1e-3)
    assert worker.updates.cards()[0].policy_version == "run/3"


def changed(spec: UpdateSpec, **fields: object) -> UpdateSpec:
    """With another adapter entry."""
    assert spec.manifest.adapter is not None
    entry = AdapterEntry.model_validate(spec.manifest.adapter.model_dump() | fields)
    return spec.model_copy(update={"manifest": spec.manifest.model_copy(update={"adapter": entry})})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("base", "start it from the trainer's `model`"),
        ("rank", "for an adapter of rank 5"),
        ("alpha", "probe: log-probabilities differ"),
        ("unknown to this release", "is not of this model"),
        ("file", "with digest"),
    ],
)
async def test_what_is_not_the_trainers_adapter_is_refused(
    worker: Worker,  # noqa: F811
    tmp_path: Path,
    fault: str,
    said: str,
) -> None:
    """The worker goes on by the adapter that it had. A release that knows no adapters drops the entry, and finds that the tensors
    are none of the model's."""
    first = adapted(TINY, 1)
    assert (await worker.update(adapter_update(TINY, first, tmp_path / "w1", 1))).state == "served"
    spec = adapter_update(TINY, adapted(TINY, 2), tmp_path / "w2", 2)
    if fault == "base":
        spec = changed(spec, base="0" * 32)
    elif fault == "rank":
        spec = changed(spec, rank=5)
    elif fault == "alpha":
        spec = changed(spec, alpha=3)
    elif fault == "file":
        file = tmp_path / "w2" / spec.manifest.shards[0].name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        spec = spec.model_copy(update={"manifest": spec.manifest.model_copy(update={"adapter": None})})
    ended = await worker.update(spec)
    assert ended.state == "failed" and said in ended.message
    async with asyncio.timeout(60):
        while not worker.updates.healthy:  # weights that were loaded are gone back from
            await asyncio.sleep(0.01)
    assert worker.updates.cards()[0].policy_version == "run/1"
    assert await worker.engine.score([5, 6, 7, 8]) == pytest.approx(logprobs_of(first, [5, 6, 7, 8]), abs=1e-3)


@pytest.mark.parametrize("change", ["another model", "gone"])
async def test_a_checkpoint_that_has_changed_under_its_path_is_refused(tmp_path: Path, change: str) -> None:
    """By a number too small for the probe to see. What was pushed before goes on."""
    base = shutil.copytree(TINY, tmp_path / "base")
    one = Worker(tmp_path / "staging", base)
    await one.engine.start()
    first = adapted(base, 1)
    assert (await one.update(adapter_update(base, first, tmp_path / "w1", 1))).state == "served"
    spec, file = adapter_update(base, adapted(base, 2), tmp_path / "w2", 2), base / "model.safetensors"
    if change == "gone":
        file.unlink()
    else:
        tensors = load_file(file)
        tensors["model.norm.weight"][0] *= 1.0001
        save_file(tensors, file, metadata={"format": "pt"})
    ended = await one.update(spec)
    assert ended.state == "failed" and "have changed since this engine was started" in ended.message
    assert one.updates.healthy and one.updates.cards()[0].policy_version == "run/1"
    assert await one.engine.score([5, 6, 7, 8]) == pytest.approx(logprobs_of(first, [5, 6, 7, 8]), abs=1e-3)
    await one.updates.close()
    await one.engine.stop()
