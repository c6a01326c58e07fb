"""Copies by difference: what a worker makes of them is the model, and a full copy is written where one is due."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steno.contracts.errors import BadRequest, StoreUnavailable
from steno.contracts.policy import PATCHES, WorkerUpdate
from steno.contracts.wire.frames import ModelCard
from steno.contracts.worker_view import WorkerView
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.files import differences
from steno_trainer.weights.files.copies import WeightsCopies, WeightsCopy
from steno_trainer.weights.files.differences import WeightsDifferences, patch_takers
from steno_trainer.weights.files.shards import tensor_bytes
from steno_trainer.weights.publisher import FULL_AFTER_REFUSAL, Publisher
from steno_trainer.weights.source import ModelWeights, TensorMeta
from steno_trainer.weights.transports import FilesystemTransport
from steno_worker.weights.patching import PatchJob
from tests.support.records.worker_views import worker_view
from tests.unit.trainer.weights.fake_proxy import FakeProxy
from tests.unit.trainer.weights.models import qwen

PATIENCE_S = 60.0


class Given:
    """A source of these tensors, one to a bucket, which may be changed between writes."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def plan(self) -> list[list[TensorMeta]]:
        return [[TensorMeta(name, t.dtype, tuple(t.shape))] for name, t in self.tensors.items()]

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield {name: tensor}


def at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def large(count: int = 20_000) -> Given:
    generator = torch.Generator().manual_seed(0)
    return Given(
        a=torch.randn(count, generator=generator).bfloat16(), b=torch.randn(50, 40, generator=generator),
        n=torch.arange(7), empty=torch.zeros(0),
    )  # fmt: skip


def move(source: Given, seed: int = 0, scale: float = 1e-3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in source.tensors.values():
        if tensor.is_floating_point():
            tensor += (scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def made(copy: WeightsCopy, into: Path) -> dict[str, bytes]:
    """What a worker that has nothing makes of it, tensor by tensor; it has checked every digest."""
    from safetensors import safe_open

    folder = copy.folder
    if copy.manifest.patches:
        into.mkdir(parents=True)
        folder = PatchJob(
            copy.manifest, copy.folder, [shard.name for shard in copy.manifest.shards], copy.manifest.patches, copy.folder,
            False, into, threading.Event(), lambda count: None,
        ).run()  # fmt: skip
    found: dict[str, bytes] = {}
    for shard in copy.manifest.shards:
        with safe_open(folder / shard.name, framework="pt") as opened:
            found |= {name: bytes(tensor_bytes(opened.get_tensor(name))) for name in opened.keys()}  # noqa: SIM118
    return found


def kinds(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_every_version_of_a_chain_is_the_model_to_the_bit(tmp_path: Path) -> None:
    source, copies = large(), WeightsDifferences(tmp_path / "copies", full_every=4)
    source.tensors["a"][:2] = torch.tensor([0.0, -0.0]).bfloat16()
    for step in range(6):
        copy = copies.write(at(step), source)
        assert len(copy.manifest.patches) == step % 4
        assert copy == WeightsCopy.read(copy.folder)
        now = {name: bytes(tensor_bytes(tensor)) for name, tensor in source.tensors.items()}
        assert made(copy, tmp_path / f"made-{step}") == now
        move(source, step)
        source.tensors["a"][:2] *= -1
    assert kinds(tmp_path / "copies") == ["changes-run-5", "weights-run-4"]


def test_a_copy_by_difference_is_small_and_needs_no_other_folder(tmp_path: Path) -> None:
    source, copies = large(), WeightsDifferences(tmp_path, keep=1)
    full = copies.write(at(0), source)
    source.tensors["a"][::50] *= 1.01
    copy = copies.write(at(1), source)
    assert kinds(tmp_path) == ["changes-run-1"]
    [patch] = copy.manifest.patches
    assert patch.before == full.manifest.digest and patch.after == copy.manifest.digest
    assert patch.size < 0.05 * full.manifest.size
    assert {shard.name.split("-")[0] for shard in copy.manifest.shards} == {"base"}, "nobody may load it as a model"
    assert not list(copy.folder.glob("*.index.json"))


def test_a_tied_model_and_a_head_of_its_own_come_through(tmp_path: Path) -> None:
    for tied in (True, False):
        model = qwen(tied=tied)
        copies = WeightsDifferences(tmp_path / str(tied))
        source = ModelWeights(model, dtype=torch.bfloat16, bucket_bytes=20_000)
        copies.write(at(0), source)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        made(copies.write(at(1), source), tmp_path / f"made-{tied}")


def test_a_version_that_is_written_again_is_the_same(tmp_path: Path) -> None:
    source, copies = large(), WeightsDifferences(tmp_path)
    assert copies.write(at(0), source) == copies.write(at(0), source)
    move(source)
    changed = copies.write(at(1), source)
    assert changed.manifest.patches and copies.write(at(1), source) == changed
    again = copies.write(at(1), source, full=True)
    assert not again.manifest.patches and again.manifest.digest == changed.manifest.digest
    move(source)
    with pytest.raises(CopyFailed, match="holds other weights of version run/1"):
        copies.write(at(1), source, full=True)


@pytest.mark.parametrize("change", ["dtype", "shape", "name"])
def test_a_model_of_another_shape_is_sent_whole(tmp_path: Path, change: str) -> None:
    source, copies = large(), WeightsDifferences(tmp_path)
    copies.write(at(0), source)
    b = source.tensors.pop("b")
    source.tensors["c" if change == "name" else "b"] = {"dtype": b.double(), "shape": b[1:], "name": b}[change]
    assert not copies.write(at(1), source).manifest.patches
    assert copies.write(at(2), source).manifest.patches


def test_where_a_full_copy_is_smaller_it_is_sent(tmp_path: Path) -> None:
    source, copies = Given(a=torch.randn(1000).bfloat16()), WeightsDifferences(tmp_path)
    copies.write(at(0), source)
    source.tensors["a"] = torch.randint(0, 2**15 - 2**8, (1000,)).to(torch.int16).view(torch.bfloat16)
    copy = copies.write(at(1), source)
    assert not copy.manifest.patches and kinds(tmp_path) == ["weights-run-0", "weights-run-1"]
    assert made(copy, tmp_path)["a"] == bytes(tensor_bytes(source.tensors["a"]))
    source.tensors["a"][3] = 0.5
    assert copies.write(at(2), source).manifest.patches


def test_a_chain_ends_before_its_patches_are_as_large_as_the_model(tmp_path: Path) -> None:
    source, copies = large(), WeightsDifferences(tmp_path, full_every=64)
    lengths = []
    for step in range(8):
        lengths.append(len(copies.write(at(step), source).manifest.patches))
        move(source, step, scale=0.5)
    assert 0 in lengths[1:] and max(lengths) < 5


def test_after_a_write_that_failed_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    source, copies = large(), WeightsDifferences(tmp_path)
    copies.write(at(0), source)
    move(source)
    source.tensors["a"][0] = float("nan")
    with pytest.raises(CopyFailed, match="a has NaN"):
        copies.write(at(1), source)
    source.tensors["a"][0] = 1.0
    assert not copies.write(at(1), source).manifest.patches
    assert copies.write(at(2), source).manifest.patches


@pytest.mark.parametrize("fault", ["links", "gone", "for now"])
def test_where_files_can_not_be_linked_full_copies_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    source, copies, link = large(), WeightsDifferences(tmp_path), os.link
    first = copies.write(at(0), source)
    if fault == "gone":
        for shard in first.manifest.shards:
            (first.folder / shard.name).unlink()
    else:
        monkeypatch.setattr(differences.os, "link", _no_links if fault == "links" else _no_room)
    move(source)
    copy = copies.write(at(1), source)
    assert not copy.manifest.patches
    assert made(copy, tmp_path)["b"] == bytes(tensor_bytes(source.tensors["b"]))
    monkeypatch.setattr(differences.os, "link", link)
    assert bool(copies.write(at(2), source).manifest.patches) is (fault != "links")


def _no_links(old: Path, new: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def _no_room(old: Path, new: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_version_that_is_sent_whole_leaves_the_one_before(tmp_path: Path) -> None:
    """Workers serve it, and go back to it; and no more than two full copies lie there."""
    source, copies = large(), WeightsDifferences(tmp_path)
    for step, full in ((0, True), (1, False), (2, False), (2, True), (3, False), (3, True)):
        copies.write(at(step), source, full=full)
        if full:
            move(source, step)
        if (step, full) == (2, True):
            assert kinds(tmp_path) == ["changes-run-1", "changes-run-2", "weights-run-2"]
    assert kinds(tmp_path) == ["changes-run-3", "weights-run-2", "weights-run-3"]
    shards = [
        path for folder in tmp_path.iterdir() for path in folder.iterdir() if path.name.startswith(("base", "model-0"))
    ]
    full = sum(path.stat().st_size for path in (tmp_path / "weights-run-3").glob("model-0*"))
    assert sum({path.stat().st_ino: path.stat().st_size for path in shards}.values()) == 2 * full


@pytest.mark.parametrize("full_every", [0, 65])
def test_chains_have_a_length(tmp_path: Path, full_every: int) -> None:
    with pytest.raises(ValueError, match=f"got {full_every}, must be from 1 to 64"):
        WeightsDifferences(tmp_path, full_every=full_every)


def test_other_trainers_copies_are_full_in_any_case(tmp_path: Path) -> None:
    copies, source = WeightsCopies(tmp_path), large()
    assert [bool(copies.write(at(step), source).manifest.patches) for step in (0, 1)] == [False, False]


# -- who takes them


class Fleet:
    """`Client`, as far as it is asked for workers."""

    def __init__(self, *workers: WorkerView | None) -> None:
        self._workers = workers

    def workers(self) -> list[WorkerView]:
        if None in self._workers:
            raise StoreUnavailable("away")
        return [worker for worker in self._workers if worker is not None]


def worker(policy: str = "p", text_only: bool = False, *capabilities: str) -> WorkerView:
    return worker_view("w", ModelCard("m", 8, policy=policy, text_only=text_only, capabilities=list(capabilities)))


@pytest.mark.parametrize(
    ("workers", "takes"),
    [
        ([], True), ([worker("p", False, PATCHES)], True), ([worker("p", False, PATCHES), worker("p")], False),
        ([worker("other"), worker("p", True)], True), ([None], False),
    ],
)  # fmt: skip
def test_all_workers_of_the_policy_must_know_patches(workers: list[Any], takes: bool) -> None:
    assert patch_takers(Fleet(*workers), "p")() is takes  # type: ignore[arg-type]


def test_a_worker_that_refuses_patches_gets_full_copies_for_a_while(tmp_path: Path) -> None:
    proxy, source = FakeProxy(), large()
    with Publisher(FilesystemTransport(WeightsDifferences(tmp_path)), [proxy]) as publisher:

        def push(step: int) -> bool:
            publication = publisher.publish(at(step), source)
            publisher.wait(publication, PATIENCE_S)
            move(source, step)
            return bool(publication.spec.manifest.patches)

        assert [push(step) for step in range(2)] == [False, True]
        proxy.workers = [WorkerUpdate(worker_id="w", state="failed", error="weights_refused: staging_dir: no room")]
        assert push(2)
        proxy.workers = []
        assert [push(3 + step) for step in range(FULL_AFTER_REFUSAL + 1)] == [False] * FULL_AFTER_REFUSAL + [True]
        proxy.workers = [WorkerUpdate(worker_id="w", state="failed", error="worker_lost: the worker went away")]
        assert push(20) and push(21), "it may come back"
    with Publisher(
        FilesystemTransport(WeightsDifferences(tmp_path / "two")), [FakeProxy()], takes_patches=lambda: False
    ) as publisher:
        assert not push(30) and not push(31)


def test_a_proxy_that_knows_no_patches_gets_full_copies(tmp_path: Path) -> None:
    proxy, source = FakeProxy(), large()
    with Publisher(FilesystemTransport(WeightsDifferences(tmp_path)), [proxy]) as publisher:
        publisher.wait(publisher.publish(at(0), source), PATIENCE_S)
        proxy.faults = [BadRequest("manifest.patches: extra inputs are not permitted", field="manifest.patches")]
        move(source)
        refused = publisher.publish(at(1), source)
        with pytest.raises(Exception, match="not permitted"):
            publisher.wait(refused, PATIENCE_S)
        assert refused.patches_refused
        again = publisher.publish(at(1), source)
        assert publisher.wait(again, PATIENCE_S).state == "done" and not again.spec.manifest.patches
        assert again.spec.manifest.digest == refused.spec.manifest.digest
