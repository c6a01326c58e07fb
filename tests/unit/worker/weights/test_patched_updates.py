"""Weights by difference at a worker: made of what it kept or of the full copy they came with, and checked whole (I10)."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from steno.contracts import weight_patch
from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import PATCHES, Manifest, PatchEntry, UpdateSpec
from steno.contracts.wire.frames import Apply, Chunk
from steno_worker.weights import stage, staged_files
from steno_worker.weights.patching import PatchBase, PatchedStaging, PatchJob, whole_spec
from steno_worker.weights.staged_files import UpdateAbandoned
from steno_worker.weights.update_state import WeightUpdate
from tests.support.waiting import until
from tests.support.weights.patches import Chain
from tests.unit.worker.weights.test_updates import Bench, Proxy

KINDS = ("filesystem", "stream")


class Trained:
    """Three tensors of a model in two shards, pushed step by step: the first in full, the others by difference."""

    def __init__(self, root: Path, kind: str) -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "x": torch.randn(3000, generator=generator).bfloat16(), "y": torch.randn(40, 30, generator=generator),
            "n": torch.arange(7),
        }  # fmt: skip
        self._chain = Chain(root, [["x", "n"], ["y"]])

    def push(self, step: int, *, full: bool = False) -> UpdateSpec:
        for name in ("x", "y"):
            self.tensors[name].view(-1)[step::7] *= 1.5
        return self._spec(step, self._chain.push(f"w{step}", self.tensors, full=full or not step))

    def _spec(self, step: int, manifest: Manifest) -> UpdateSpec:
        location = str(self.folder) if self.kind == "filesystem" else ""
        return UpdateSpec(lineage="run", step=step, transport=self.kind, location=location, manifest=manifest)  # type: ignore[arg-type]

    @property
    def folder(self) -> Path:
        return self._chain.folder


class Side:
    """A worker, and a proxy that serves it from the trainer's newest folder."""

    def __init__(self, bench: Bench, trained: Trained) -> None:
        self.bench, self.trained = bench, trained
        bench.engine.check_files = False
        self.proxy: Proxy = bench.proxy()
        self.sent: list[str] = []
        self.damage: Callable[[str, bytes], bytes] = lambda name, data: data

    async def serve(self, spec: UpdateSpec) -> str:
        """Until it is served or has failed. Returns: what went wrong, or ""."""
        state = await self.prepare(spec)
        if state == "ready":
            self.proxy.tell(Apply(spec.update_id))
            await self.proxy.until("served")
        return self.proxy.frames[-1].message

    async def prepare(self, spec: UpdateSpec) -> str:
        self.proxy.frames.clear()
        self.sent.clear()
        self.proxy.prepare(spec, spec.update_id)
        async with asyncio.timeout(60):
            while True:
                ours = [frame for frame in self.proxy.frames if frame.update_id == spec.update_id]
                if not ours:
                    await asyncio.sleep(0.001)
                    continue
                last = ours[-1]
                if last.state != "receiving":
                    return last.state
                if last.shard:
                    self._upload(spec, last.shard, last.offset, last.credit)
                while self.proxy.frames[-1] is last:
                    await asyncio.sleep(0.001)

    def _upload(self, spec: UpdateSpec, name: str, offset: int, credit: int) -> None:
        if name not in self.sent:
            self.sent.append(name)
        data = self.damage(name, (self.trained.folder / name).read_bytes())
        piece = data[offset : offset + credit]
        self.proxy.tell(Chunk(spec.update_id, name, offset, piece, zlib.crc32(piece)))

    def loaded(self) -> dict[str, Tensor]:
        """What the engine was given last, as it reads it."""
        update, found = self.bench.engine.loaded[-1], dict[str, Tensor]()
        assert not update.spec.manifest.patches
        for shard in update.spec.manifest.shards:
            with safe_open(update.folder / shard.name, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found

    def check_loaded(self, version: str) -> None:
        assert self.bench.updates.cards()[0].policy_version == version
        found = self.loaded()
        assert found.keys() == self.trained.tensors.keys()
        for name, tensor in self.trained.tensors.items():
            assert torch.equal(found[name], tensor), name


@pytest.fixture(params=KINDS)
async def side(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Side]:
    bench = Bench(tmp_path / "staging")
    yield Side(bench, Trained(tmp_path / "trainer", request.param))
    await bench.updates.close()


def kept(side: Side) -> list[str]:
    return sorted(path.name for path in side.bench.root.iterdir())


async def test_each_version_is_made_of_the_one_before(side: Side) -> None:
    for step in range(4):
        assert await side.serve(side.trained.push(step)) == ""
        side.check_loaded(f"run/{step}")
        if side.trained.kind == "stream" and step:
            assert {name[:9] for name in side.sent} == {f"patch-{step:03d}"}, "only what is new travels"
    await asyncio.sleep(0)
    await side.bench.updates._stager._streams.do(lambda: None)
    assert len(kept(side)) == 1, "the copy that is served, and nothing else"


async def test_a_worker_that_has_nothing_or_missed_some_gets_there(side: Side) -> None:
    side.trained.push(0)
    side.trained.push(1)
    assert await side.serve(side.trained.push(2)) == ""  # from nothing
    side.check_loaded("run/2")
    if side.trained.kind == "stream":
        assert [name[:9] for name in side.sent] == ["base-0000"] * 2 + ["patch-001"] * 2 + ["patch-002"] * 2
    side.trained.push(3)
    side.trained.push(4)
    assert await side.serve(side.trained.push(5)) == ""  # two were skipped
    side.check_loaded("run/5")
    if side.trained.kind == "stream":
        assert {name[:9] for name in side.sent} == {"patch-003", "patch-004", "patch-005"}
    assert await side.serve(side.trained.push(6, full=True)) == ""
    side.check_loaded("run/6")
    assert await side.serve(side.trained.push(7)) == ""
    side.check_loaded("run/7")


async def test_a_copy_that_was_damaged_or_lost_is_replaced_by_the_full_one(side: Side) -> None:
    await side.serve(side.trained.push(0))
    await side.serve(side.trained.push(1))
    for step, harm in enumerate(("damaged", "cut", "gone"), 2):
        folder = side.bench.engine.loaded[-1].folder
        shards = sorted(folder.glob("*.safetensors"))
        if harm == "gone":
            shutil.rmtree(folder)
        else:
            data = bytearray(shards[0].read_bytes())
            data[-1] ^= 1
            shards[0].write_bytes(data if harm == "damaged" else data[:-1])
        assert await side.serve(side.trained.push(step)) == ""
        side.check_loaded(f"run/{step}")
        if side.trained.kind == "stream":
            assert side.sent[0].startswith("patch-") and any(name.startswith("base-") for name in side.sent)


async def test_a_damaged_patch_is_refused_and_nothing_is_lost(side: Side) -> None:
    await side.serve(side.trained.push(0))
    await side.serve(side.trained.push(1))
    spec = side.trained.push(2)
    name = spec.manifest.patches[1].files[0].name
    base = side.bench.updates._stager._base
    good = (side.trained.folder / name).read_bytes()
    damaged = [bytes([*good[:-1], good[-1] ^ 1]), bytes([good[0] ^ 1, *good[1:]])]
    cut = [good[:-1], good + b"\0"] if side.trained.kind == "filesystem" else []
    for bad in damaged + cut:
        if side.trained.kind == "filesystem":
            (side.trained.folder / name).write_bytes(bad)
        else:
            side.damage = lambda which, data, bad=bad: bad if which == name else data  # type: ignore[misc]
        said = await side.serve(spec)
        assert name in said and ("digest" in said or "bytes" in said), said
        assert side.bench.updates.cards()[0].policy_version == "run/1" and side.bench.updates.healthy
        assert side.bench.updates._stager._base is base is not None, "the copy kept here is not to blame"
        assert not any(sent.startswith("base-") for sent in side.sent)
    (side.trained.folder / name).write_bytes(good)
    side.damage = lambda which, data: data
    assert await side.serve(spec) == ""
    side.check_loaded("run/2")


@pytest.mark.parametrize("side", ["stream"], indirect=True)
async def test_bytes_that_were_damaged_on_their_way_end_it_whatever_came_behind_them(side: Side) -> None:
    await side.serve(side.trained.push(0))
    spec = side.trained.push(1)
    side.proxy.prepare(spec, spec.update_id)
    await until(lambda: bool(side.proxy.frames[-1].shard))
    name = side.proxy.frames[-1].shard
    data = (side.trained.folder / name).read_bytes()
    for part, crc32 in ((slice(0, 9), 0), (slice(9, None), zlib.crc32(data[9:]))):
        side.proxy.tell(Chunk(spec.update_id, name, part.start, data[part], crc32))
    assert "were damaged on their way (crc32)" in (await side.proxy.until("failed")).message
    assert await side.serve(spec) == "" and not any(sent.startswith("base-") for sent in side.sent)
    side.check_loaded("run/1")


async def test_a_trainer_that_cuts_the_same_weights_otherwise_is_followed(side: Side, tmp_path: Path) -> None:
    """As large as before, so that only the patch tells that it is of another shard."""
    trained = side.trained
    trained.tensors = {name: torch.randn(100) for name in ("x", "y")}
    trained._chain = Chain(tmp_path / "first", [["x"], ["y"]])
    for step in range(2):
        await side.serve(trained.push(step))
    trained._chain = Chain(tmp_path / "started again", [["y"], ["x"]])
    trained._chain.push("w1", trained.tensors)
    assert await side.serve(trained.push(2)) == ""
    side.check_loaded("run/2")


async def test_a_copy_that_was_kept_meanwhile_is_not_given_up_with_the_one_before(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(2):
        await side.serve(side.trained.push(step))
    stager = side.bench.updates._stager
    patch, newer = stager._patch, PatchBase(Path("newer"), ("a", "b"), "0" * 32)

    async def after_another_was_served(update: WeightUpdate, base: PatchBase | None, patches: list[PatchEntry]) -> Path:
        if base is not None:
            stager._base = newer
            raise WeightsRefused("tensor 'x' is damaged", field="manifest.tensors.x")
        return await patch(update, base, patches)

    monkeypatch.setattr(stager, "_patch", after_another_was_served)
    assert await side.prepare(side.trained.push(2)) == "ready"
    assert stager._base is newer


@pytest.mark.parametrize("full", [False, True])
async def test_what_is_being_loaded_stays_while_the_next_is_staged(side: Side, full: bool) -> None:
    await side.serve(side.trained.push(0))
    one = side.trained.push(1, full=full)
    before = {name: tensor.clone() for name, tensor in side.trained.tensors.items()}
    assert await side.prepare(one) == "ready"
    side.bench.engine.may_load.clear()
    side.proxy.tell(Apply(one.update_id))
    two = side.trained.push(2, full=full)
    assert await side.prepare(two) == "ready"
    held = side.bench.updates._updates[one.update_id].staged
    assert held is not None and sorted(path.name for path in held.folder.glob("*.safetensors")) == sorted(
        shard.name for shard in held.spec.manifest.shards
    )
    side.bench.engine.may_load.set()
    await until(lambda: (one.update_id, "served") in [(frame.update_id, frame.state) for frame in side.proxy.frames])
    assert all(torch.equal(before[name], tensor) for name, tensor in side.loaded().items())
    side.proxy.tell(Apply(two.update_id))
    await side.proxy.until("served")
    side.check_loaded("run/2")
    await side.bench.updates._stager._streams.do(lambda: None)
    if side.trained.kind == "stream" or not full:
        assert len(kept(side)) == 1, "the copy that is served, and nothing else"


async def test_a_chain_whose_full_copy_is_cut_off_is_refused(side: Side) -> None:
    side.trained.push(0)
    spec = side.trained.push(1)
    path = side.trained.folder / spec.manifest.shards[0].name
    data = path.read_bytes()
    path.unlink()
    if side.trained.kind == "filesystem":
        assert "can't be patched: No such file" in await side.serve(spec)
        path.write_bytes(data[:-3])
        assert "ends too early" in await side.serve(spec)
    else:
        side.damage = lambda name, whole: bytes(len(whole)) if name == path.name else whole
        path.write_bytes(data)
        assert "digest" in await side.serve(spec)
    path.write_bytes(data)
    side.damage = lambda name, whole: whole
    assert await side.serve(spec) == ""
    side.check_loaded("run/1")


async def test_patches_of_other_weights_are_refused_by_the_result(side: Side) -> None:
    """Every file is what it says, and what they make is not what the manifest says."""
    side.trained.push(0)
    spec = side.trained.push(1)
    spec.manifest.tensors[0].digest = "0" * 32
    said = await side.serve(spec)
    assert "holds tensor 'x' with digest" in said
    assert side.bench.engine.loaded == [] and not any("-whole" in path.name for path in side.bench.root.iterdir())


async def test_weights_that_fail_the_probe_leave_what_was_served_and_what_comes_next_goes_onto_it(side: Side) -> None:
    await side.serve(side.trained.push(0))
    await side.serve(side.trained.push(1))
    before = {name: tensor.clone() for name, tensor in side.trained.tensors.items()}
    spec = side.trained.push(2)
    probe = {"token_ids": [1, 2, 3], "logprobs": [-9.0, -9.0]}
    wrong = UpdateSpec.model_validate(spec.model_dump() | {"probe": probe})
    await side.prepare(wrong)
    side.proxy.tell(Apply(wrong.update_id))
    async with asyncio.timeout(60):
        while not (side.bench.updates.healthy and side.bench.log[-1] == ("run/1", True)):
            await asyncio.sleep(0.001)
    assert all(torch.equal(before[name], tensor) for name, tensor in side.loaded().items())
    assert await side.serve(side.trained.push(3)) == ""
    side.check_loaded("run/3")


async def test_a_disk_that_is_full_refuses_before_anything_is_written(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    await side.serve(side.trained.push(0))
    monkeypatch.setattr(staged_files, "SPARE_BYTES", 10**18)
    spec = side.trained.push(1)
    assert "staging_dir: " in await side.serve(spec)
    monkeypatch.setattr(staged_files, "SPARE_BYTES", 0)
    assert await side.serve(spec) == ""
    side.check_loaded("run/1")


@pytest.mark.parametrize("side", ["filesystem"], indirect=True)
@pytest.mark.parametrize("has_base", [True, False])
async def test_a_folder_that_hangs_is_given_up(side: Side, monkeypatch: pytest.MonkeyPatch, has_base: bool) -> None:
    first, answers, real = side.trained.push(0), threading.Event(), stage.readable_folder
    if has_base:
        await side.serve(first)

    def hanging(folder: str) -> Path:
        answers.wait()
        return real(folder)

    spec = side.trained.push(1)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(stage, "readable_folder", hanging)
            patched.setattr(stage, "STUCK_S", 0.1)
            patched.setattr(stage, "REPORT_EVERY_S", 0.01)
            assert "nothing could be read" in await side.serve(spec)
        assert await side.serve(spec) == "", "its thread, which still hangs, holds up nothing"
    finally:
        answers.set()
    side.check_loaded("run/1")


async def test_a_newer_update_ends_one_that_is_being_made(side: Side) -> None:
    await side.serve(side.trained.push(0))
    spec = side.trained.push(1)
    side.proxy.prepare(spec, spec.update_id)
    newer = side.trained.push(2)
    assert await side.serve(newer) == ""
    side.check_loaded("run/2")


def test_a_worker_says_that_it_knows_patches(tmp_path: Path) -> None:
    assert PATCHES in Bench(tmp_path).updates.cards()[0].capabilities


def test_what_leads_from_one_version_to_another_is_found_by_digests(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "stream")
    manifests = [trained.push(step).manifest for step in range(4)]
    last = manifests[3]
    for step, manifest in enumerate(manifests[:3]):
        base = PatchBase(tmp_path, ("a", "b"), manifest.digest)
        assert base.patches_to(last) == last.patches[step:]
    assert PatchBase(tmp_path, ("a", "b"), last.digest).patches_to(last) is None
    assert PatchBase(tmp_path, ("a",), manifests[0].digest).patches_to(last) is None


@pytest.mark.parametrize("fault", ["no patch", "other shard", "abandoned"])
def test_a_job_that_ends_early_leaves_nothing(tmp_path: Path, fault: str) -> None:
    trained = Trained(tmp_path / "trainer", "filesystem")
    trained.push(0)
    manifest, abandoned = trained.push(1).manifest, threading.Event()
    into = tmp_path / "into"
    into.mkdir()
    [patch] = manifest.patches
    if fault == "abandoned":
        abandoned.set()
    else:
        text = b"[" * 100 if fault == "no patch" else _of_another_shard()
        path = trained.folder / patch.files[0].name
        path.unlink()
        header = text[: text.rindex(b"}") + 1] if b"}" in text else text
        path.write_bytes(len(header).to_bytes(8, "little") + text)
        patch.files[0].size = path.stat().st_size
    job = PatchJob(
        manifest, trained.folder, [shard.name for shard in manifest.shards], [patch], trained.folder, True, into,
        abandoned, lambda count: None,
    )  # fmt: skip
    says = {"no patch": "has a header that can't be read", "other shard": "is not of this shard", "abandoned": ""}[
        fault
    ]
    with pytest.raises(Exception, match=says):
        job.run()
    assert not into.exists()


def test_a_thread_that_was_left_behind_harms_no_later_attempt(tmp_path: Path) -> None:
    trained, late = Trained(tmp_path / "trainer", "filesystem"), threading.Event()
    trained.push(0)
    manifest = trained.push(1).manifest
    jobs = []
    for abandoned in (late, threading.Event()):
        staging = PatchedStaging(tmp_path / "staging", "u1", manifest)
        staging.open([], 0)
        jobs.append(PatchJob(
            manifest, trained.folder, [shard.name for shard in manifest.shards], manifest.patches, trained.folder, False,
            staging.folder, abandoned, lambda count: None,
        ))  # fmt: skip
    made = jobs[1].run()
    late.set()
    with pytest.raises((UpdateAbandoned, WeightsRefused)):
        jobs[0].run()
    assert len(list(made.iterdir())) == len(manifest.shards)


def _of_another_shard() -> bytes:
    """Behind the length: a whole patch, of a tensor that this shard has not."""
    before, now = (torch.full((4,), value, dtype=torch.uint8).numpy() for value in (0, 1))
    packed = weight_patch.pack_block(0, before, now)
    assert packed is not None
    tensor = weight_patch.PatchedTensor(name="y", width=1, elements=4, blocks=[packed.about])
    header = weight_patch.PatchHeader(tensors=[tensor]).model_dump_json().encode()
    return header + packed.places + packed.differences


def test_an_update_as_it_lies_here_has_shards_and_no_patches(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "stream")
    full = trained.push(0)
    assert whole_spec(full) is full
    spec = trained.push(1)
    whole = whole_spec(spec)
    assert whole.manifest.digest == spec.manifest.digest and not whole.manifest.patches
    assert json.loads(whole.model_dump_json())["manifest"].keys() == {"tensors", "shards"}
    assert len({shard.name for shard in whole.manifest.shards}) == 2
