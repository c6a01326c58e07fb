"""Adapters alone on their way through the whole product: a real proxy, real workers with the embedded engine, as processes.

The oracle is peft's model, as in `test_updates.py`: what a worker samples has the log-probabilities that it gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steno.models import TINY
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.model.adapter import add_adapter
from steno_trainer.model.model import load_model
from steno_trainer.weights.adapters import AdapterWeights, adapted_layers, adapter_entry, weights_of
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport
from tests.integration.weights.test_updates import (
    PATIENCE_S,
    check_late_worker,
    check_served,
    kill,
    publisher,
    versions,
)
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running
from tests.support.weights.probe import make_probe, probe_ids

WORKER = ("--engine", "transformers", "--model", str(TINY))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path / "stack", (*WORKER, "--worker-id", "first")) as stack:
        yield stack


def adapted(steps: int, rank: int = 4) -> Any:
    """The worker's own model with an adapter: as a trainer's after so many steps."""
    lm = load_model(str(TINY), precision="float32", zero=None).lm
    lm.set_attn_implementation("eager")
    add_adapter(lm, rank=rank, alpha=8, targets=(), seed=0)
    generator = torch.Generator().manual_seed(steps)
    for layer in adapted_layers(lm).values():
        weight = layer.lora_B["default"].weight
        weight.data.copy_(0.05 * steps * torch.randn(weight.shape, generator=generator))
    return lm


def transport(kind: str, folder: Path, model: Path = TINY) -> Transport:
    copies = WeightsCopies(folder, adapter=adapter_entry(adapted(0), model))
    return FilesystemTransport(copies) if kind == "filesystem" else StreamTransport(copies)


def sources(model: Any) -> tuple[AdapterWeights, Any]:
    return AdapterWeights(model), make_probe(model, probe_ids(model.config.vocab_size))


@pytest.mark.parametrize("kind", ["filesystem", "stream"])
def test_each_adapter_is_sampled_from_also_by_a_worker_that_comes_late(stack: Stack, tmp_path: Path, kind: str) -> None:
    with publisher(stack, transport(kind, tmp_path / "copies")) as sending:
        for step in (1, 2, 3):
            model = adapted(step)
            publication = sending.publish(PolicyVersion("run", step), *sources(model))
            update = sending.wait(publication, PATIENCE_S)
            assert (update.state, publication.failed) == ("done", {}), stack.logs()
            check_served(stack, f"trial-{step}", f"run/{step}", model)
        size = publication.spec.manifest.size
        assert size < (TINY / "model.safetensors").stat().st_size / 4
        if kind == "stream":
            assert publication.bytes_sent == size
        # It has the model that it was started from, and needs this adapter alone.
        check_late_worker(stack, model)
        if kind == "stream":
            assert publication.bytes_sent == 2 * size


def test_a_worker_started_again_and_a_trainer_started_again_have_the_adapter(stack: Stack, tmp_path: Path) -> None:
    model = adapted(2)
    with publisher(stack, transport("stream", tmp_path / "copies")) as sending:
        sending.wait(sending.publish(PolicyVersion("run", 2), *sources(model)), PATIENCE_S)
        kill(stack.workers.pop())
        stack.start_worker("--worker-id", "again", name="again")
        until(lambda: versions(stack).get("run/2") == ["again"])
        check_served(stack, "again", "run/2", model)
    # Its first push has the weights that the other one ended with, under a lineage of its own.
    with publisher(stack, transport("stream", tmp_path / "copies")) as resumed:
        first = resumed.publish(PolicyVersion("new", 2), *sources(model), parent=PolicyVersion("run", 2))
        assert resumed.wait(first, PATIENCE_S).state == "done", stack.logs()
        check_served(stack, "resumed", "new/2", model)
        after = adapted(3)
        resumed.wait(resumed.publish(PolicyVersion("new", 3), *sources(after)), PATIENCE_S)
        check_served(stack, "after", "new/3", after)


def test_an_adapter_goes_onto_the_model_also_after_other_weights_were_pushed(stack: Stack, tmp_path: Path) -> None:
    merged = adapted(3)
    with publisher(stack, FilesystemTransport(WeightsCopies(tmp_path / "whole"))) as whole:
        update = whole.wait(whole.publish(PolicyVersion("run", 3), weights_of(merged), sources(merged)[1]), PATIENCE_S)
        assert update.state == "done", stack.logs()
    with publisher(stack, transport("filesystem", tmp_path / "alone")) as alone:
        model = adapted(1)
        update = alone.wait(alone.publish(PolicyVersion("other", 4), *sources(model)), PATIENCE_S)
        assert update.state == "done", stack.logs()
        check_served(stack, "alone", "other/4", model)


def test_an_adapter_of_another_model_is_refused_by_name_and_the_old_one_goes_on(stack: Stack, tmp_path: Path) -> None:
    model = adapted(1)
    with publisher(stack, transport("filesystem", tmp_path / "copies")) as sending:
        sending.wait(sending.publish(PolicyVersion("run", 1), *sources(model)), PATIENCE_S)
    other = tmp_path / "model"
    shutil.copytree(TINY, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-6 * tensors["model.norm.weight"][0] + 1e-6
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with publisher(stack, transport("filesystem", tmp_path / "others", other)) as sending:
        # Too little for the probe to see.
        publication = sending.publish(PolicyVersion("run", 2), *sources(adapted(2)))
        assert sending.wait(publication, PATIENCE_S).state == "failed"
        [why] = publication.failed.values()
        assert why.startswith("weights_refused: adapter.base: ") and "start it from the trainer's `model`" in why
        check_served(stack, "still", "run/1", model)


def test_an_adapter_that_the_probe_refuses_leaves_the_one_before(stack: Stack, tmp_path: Path) -> None:
    model = adapted(1)
    with publisher(stack, transport("stream", tmp_path / "copies")) as sending:
        sending.wait(sending.publish(PolicyVersion("run", 1), *sources(model)), PATIENCE_S)
        publication = sending.publish(PolicyVersion("run", 2), AdapterWeights(adapted(2)), sources(adapted(3))[1])
        assert sending.wait(publication, PATIENCE_S).state == "failed"
        [why] = publication.failed.values()
        assert why.startswith("weights_refused: probe: ")
        check_served(stack, "still", "run/1", model)
