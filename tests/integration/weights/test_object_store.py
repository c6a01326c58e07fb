"""Weights through an object store: a trainer's files brought there, and read there by a worker, over HTTP, with faults (I10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steno.config.object_store import ObjectStore
from steno.contracts.errors import ConfigError, ObjectStoreFailed
from steno.contracts.policy import UpdateSpec, WorkerUpdate
from steno.contracts.wire.frames import Apply
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.files.differences import WeightsDifferences
from steno_trainer.weights.object_weights import OWNER, ObjectPlace, ObjectTransport
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.transports import StagedWeights
from steno_worker.weights import object_files
from tests.integration.weights.test_updates import PATIENCE_S, check_late_worker, check_served, model_after, sources
from tests.support.machine.object_server import BUCKET, KEY_ID, SECRET, ObjectServer, object_server, once
from tests.support.programs.stack import running
from tests.support.waiting import until
from tests.support.weights.patches import TensorSource
from tests.unit.trainer.weights.fake_proxy import FakeProxy
from tests.unit.trainer.weights.test_follow import following
from tests.unit.worker.weights.test_updates import Bench, Proxy

URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


def store(url: str = URL) -> ObjectStore:
    return ObjectStore(url, "weights_url")


class Trained:
    """Three tensors of a model in two shards, pushed step by step: the first in full, the others by difference."""

    def __init__(self, root: Path, lineage: str = "run") -> None:
        self.lineage = lineage
        self.place = ObjectPlace(store(), "a-run", "default")
        self.place.claim()
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {
            "x": torch.randn(3000, generator=generator).bfloat16(), "y": torch.randn(40, 30, generator=generator),
            "n": torch.arange(7),
        }  # fmt: skip
        self._copies = WeightsDifferences(root)
        self.sent: list[int] = []

    def stage(self, step: int, *, full: bool = False) -> tuple[StagedWeights, UpdateSpec]:
        for name in ("x", "y"):
            self.tensors[name].view(-1)[step::7] *= 1.5
        version = PolicyVersion(self.lineage, step)
        copy = self._copies.write(version, TensorSource(self.tensors, [["x", "n"], ["y"]]), full=full)
        staged = self.place.stage(version, copy)
        spec = UpdateSpec(
            lineage=self.lineage, step=step, transport="filesystem", location=staged.location, manifest=staged.manifest
        )
        return staged, spec

    def push(self, step: int, *, full: bool = False) -> UpdateSpec:
        """Staged and brought."""
        staged, spec = self.stage(step, full=full)
        assert staged.bring is not None
        self.sent.append(staged.bring())
        return spec


class Side:
    """A worker that reads the store, and a proxy that tells it what to load."""

    def __init__(self, root: Path, objects: ObjectStore | None) -> None:
        self.bench = Bench(root, objects=objects)
        self.bench.engine.check_files = False
        self.proxy: Proxy = self.bench.proxy()

    async def serve(self, spec: UpdateSpec) -> str:
        """Until it is served or has failed. Returns: what went wrong, or ""."""
        self.proxy.frames.clear()
        self.proxy.prepare(spec, spec.update_id)
        await until(lambda: bool(self.proxy.frames) and self.proxy.frames[-1].state in ("ready", "failed"))
        if self.proxy.frames[-1].state == "ready":
            self.proxy.tell(Apply(spec.update_id))
            await self.proxy.until("served")
        return self.proxy.frames[-1].message

    def check_loaded(self, version: str, trained: Trained) -> None:
        from safetensors.torch import load_file

        assert self.bench.updates.cards()[0].policy_version == version
        update, found = self.bench.engine.loaded[-1], dict[str, Tensor]()
        for shard in update.spec.manifest.shards:
            found |= load_file(update.folder / shard.name)
        assert found.keys() == trained.tensors.keys()
        for name, tensor in trained.tensors.items():
            assert torch.equal(found[name], tensor), name

    @property
    def read_bytes(self) -> float:
        metrics = self.bench.metrics.registry
        return metrics.get_sample_value("steno_worker_staged_bytes_total", {"transport": "filesystem"}) or 0.0


@pytest.fixture
async def side(server: ObjectServer, tmp_path: Path) -> AsyncIterator[Side]:
    one = Side(tmp_path / "staging", store())
    yield one
    await one.bench.updates.close()


@pytest.fixture
def trained(server: ObjectServer, tmp_path: Path) -> Trained:
    return Trained(tmp_path / "copies")


def gets(server: ObjectServer) -> set[str]:
    """Names of the objects that were read."""
    return {path.rpartition("/")[2] for method, path in server.asked if method == "GET"}


async def test_each_version_is_read_from_the_store_and_only_what_is_lacking(
    server: ObjectServer, side: Side, trained: Trained
) -> None:
    full = trained.push(0)
    assert await side.serve(full) == ""
    side.check_loaded("run/0", trained)
    assert trained.sent == [full.manifest.size] and side.read_bytes == full.manifest.size
    for step in (1, 2):
        read, spec = side.read_bytes, trained.push(step)
        server.asked.clear()
        assert await side.serve(spec) == ""
        side.check_loaded(f"run/{step}", trained)
        patch = spec.manifest.patches[-1]
        assert trained.sent[-1] == patch.size, "the full copy is not brought again"
        assert gets(server) == {file.object_name for file in patch.files} and side.read_bytes - read == patch.size
    trained.push(3)
    assert await side.serve(trained.push(4)) == "", "one was skipped"
    side.check_loaded("run/4", trained)
    assert await side.serve(trained.push(5, full=True)) == ""
    side.check_loaded("run/5", trained)


async def test_a_worker_that_has_nothing_makes_the_newest_version(side: Side, trained: Trained) -> None:
    for step in range(3):
        spec = trained.push(step)
    assert await side.serve(spec) == ""
    side.check_loaded("run/2", trained)
    assert side.read_bytes == spec.manifest.size


async def test_large_files_are_read_piece_by_piece_and_in_ranges(
    server: ObjectServer, side: Side, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "PIECE_BYTES", 1000)
    monkeypatch.setattr("steno.config.object_store.RANGE_BYTES", 300)
    spec = trained.push(0)
    server.asked.clear()
    assert await side.serve(spec) == ""
    side.check_loaded("run/0", trained)
    assert len([method for method, _ in server.asked if method == "GET"]) > spec.manifest.size / 300


async def test_what_no_version_refers_to_goes_and_nothing_of_anybody_else(
    server: ObjectServer, tmp_path: Path, trained: Trained
) -> None:
    others = ["runs/one/notes.txt", "runs/one/run/notes.txt", "runs/other/run/" + 32 * "0" + ".patch"]
    for key in others:
        server.client.put_object(Bucket=BUCKET, Key=key, Body=b"1")
    for step in range(3):
        trained.push(step)
    later = Trained(tmp_path / "later", "again")
    later.push(3)
    assert any(key.startswith("runs/one/run/") for key in server.objects()), "workers may be reading them"
    specs = [later.push(4), later.push(5, full=True)]
    ours = {f"runs/one/again/{file.object_name}" for spec in specs for file in spec.manifest.files}
    assert set(server.objects()) == {*others, *ours, f"runs/one/{OWNER}"}
    trained.push(3)  # by a trainer that was taken over, and does not know it yet
    assert ours <= set(server.objects())
    specs = [later.push(6, full=True), later.push(7, full=True)]
    ours = {f"runs/one/again/{file.object_name}" for spec in specs for file in spec.manifest.files}
    assert {key for key in server.objects() if "/again/" in key} == ours


async def test_a_place_of_another_run_is_refused(server: ObjectServer, trained: Trained) -> None:
    with pytest.raises(
        CopyFailed, match=r"weights_url: s3://weights/runs/one has weights of .*a-run.*set one of its own"
    ):
        ObjectPlace(store(), "another", "default").claim()
    with pytest.raises(ObjectStoreFailed, match=r"s3://nowhere/x/steno-weights\.json: no such object or bucket"):
        ObjectPlace(store("s3://nowhere/x"), "another", "default").claim()


async def test_a_place_that_two_runs_claim_at_once_is_the_first_one_s(server: ObjectServer) -> None:
    """The second one looks before the first one has written."""
    ObjectPlace(store(), "first", "default").claim()
    owner = server.client.get_object(Bucket=BUCKET, Key=f"runs/one/{OWNER}")["Body"].read()
    server.fault = once(404, "NoSuchKey", "GET", OWNER)
    with pytest.raises(CopyFailed, match=r"has weights of \{'run': 'first', 'policy': 'default'\}"):
        ObjectPlace(store(), "second", "default").claim()
    assert server.client.get_object(Bucket=BUCKET, Key=f"runs/one/{OWNER}")["Body"].read() == owner


async def test_a_store_that_knows_no_condition_on_writing_is_used_without(server: ObjectServer) -> None:
    server.fault = once(501, "NotImplemented", "PUT", OWNER)
    ObjectPlace(store(), "first", "default").claim()
    with pytest.raises(CopyFailed, match="has weights of"):
        ObjectPlace(store(), "second", "default").claim()


# -- faults


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
async def test_what_may_pass_is_tried_again(
    server: ObjectServer, side: Side, trained: Trained, status: int, code: str
) -> None:
    server.fault = once(status, code, "PUT", ".safetensors")
    spec = trained.push(0)
    server.fault = once(status, code, "GET", ".safetensors")
    assert await side.serve(spec) == ""
    side.check_loaded("run/0", trained)


async def test_what_does_not_pass_ends_after_some_tries_and_is_said(
    server: ObjectServer, side: Side, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # by botocore, each of s3fs's
    spec = trained.push(0)
    server.fault = once(503, "SlowDown", "GET", ".safetensors", times=10**6)
    said = await side.serve(spec)
    name = spec.manifest.shards[0].object_name
    assert f"{URL}/run/{name}" in said and "SlowDown" in said
    assert side.proxy.frames[-1].code == "object_store_failed", "no full copies are sent for it"
    server.fault = lambda method, path: None  # and the proxy asks again
    assert await side.serve(spec) == ""


@pytest.mark.parametrize("harm", ["gone", "cut", "tampered"])
@pytest.mark.parametrize("kind", ["shard", "patch"])
async def test_an_object_that_is_not_what_was_sent_is_refused_by_its_name(
    server: ObjectServer, side: Side, trained: Trained, harm: str, kind: str
) -> None:
    assert await side.serve(trained.push(0)) == ""
    spec = trained.push(1, full=kind == "shard")
    file = spec.manifest.files[-1]
    key = f"runs/one/run/{file.object_name}"
    data = server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    if harm == "gone":
        server.client.delete_object(Bucket=BUCKET, Key=key)
    else:
        bad = data[:-10] if harm == "cut" else bytes([*data[:-1], data[-1] ^ 1])
        server.client.put_object(Bucket=BUCKET, Key=key, Body=bad)
    said = await side.serve(spec)
    assert side.proxy.frames[-1].code == "weights_refused"
    expected = {"gone": "no such object", "cut": f"the manifest says {len(data)} (size)", "tampered": "digest"}[harm]
    assert file.name in said and expected in said
    assert side.bench.updates.cards()[0].policy_version == "run/0" and side.bench.updates.healthy
    server.client.put_object(Bucket=BUCKET, Key=key, Body=data)
    assert await side.serve(spec) == ""
    side.check_loaded("run/1", trained)


async def test_refused_credentials_are_said_and_are_in_no_message(
    server: ObjectServer, side: Side, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    spec = trained.push(0)
    server.asks_for_keys()
    said = await side.serve(spec)
    assert "access was refused" in said and "AWS Access Key Id" in said
    with pytest.raises(ObjectStoreFailed, match="access was refused") as refused:
        trained.push(1)
    server.fault = once(403, "AccessDenied", "GET", times=10**6)
    with pytest.raises(ObjectStoreFailed, match=r"AccessDenied\): refused for \(AWS_ACCESS_KEY_ID\)") as repeated:
        trained.push(2)
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("moto")]  # the store's own
    assert any("update run/0 failed" in line for line in logged)
    for text in (said, refused.value.message, repeated.value.message, *logged):
        assert SECRET not in text and KEY_ID not in text


@pytest.mark.parametrize(
    "location",
    [
        "s3://another/runs/one/run", f"s3://{BUCKET}/runs/run", f"{URL}/other", f"{URL}/run/..", f"{URL}/../run",
        "http://127.0.0.1/run", "file:///etc", "memory://run",
    ],
)  # fmt: skip
async def test_a_worker_reads_nothing_but_what_is_below_its_own_url(
    server: ObjectServer, side: Side, trained: Trained, location: str
) -> None:
    spec = trained.push(0).model_copy(update={"location": location})
    server.asked.clear()
    said = await side.serve(spec)
    assert said == f"location: got {location!r}, must be '{URL}/run': below this worker's weights_url"
    assert server.asked == []


async def test_a_worker_without_a_url_reads_no_store(server: ObjectServer, trained: Trained, tmp_path: Path) -> None:
    one = Side(tmp_path / "staging", None)
    said = await one.serve(trained.push(0))
    assert "this worker has no weights_url" in said
    await one.bench.updates.close()


async def test_an_update_is_posted_once_all_its_files_are_there(server: ObjectServer, trained: Trained) -> None:
    staged, spec = trained.stage(0)
    server.fault = once(403, "AccessDenied", "PUT", times=3)
    proxy = FakeProxy()
    proxy.workers = [WorkerUpdate(worker_id="w", state="served")]
    publication = Publication(spec, staged.folder, staged.bring)
    async with following(publication, [proxy]):
        await until(lambda: publication.trouble is not None)
        assert not proxy.specs and "access was refused" in str(publication.trouble)
        await until(lambda: publication.settled)
        assert set(proxy.specs) == {"u-run/0"} and publication.bytes_sent == spec.manifest.size
        # Somebody has removed one; the proxy forgets the update, and it is posted again.
        key = f"runs/one/run/{spec.manifest.shards[0].object_name}"
        server.client.delete_object(Bucket=BUCKET, Key=key)
        proxy.forget()
        proxy.changed.set()
        await until(lambda: bool(proxy.specs))
    assert key in server.objects()


async def test_what_a_newer_version_replaces_is_brought_no_further(server: ObjectServer, trained: Trained) -> None:
    first, _ = trained.stage(0)
    second, spec = trained.stage(1, full=True)
    assert first.bring is not None and second.bring is not None
    with pytest.raises(ObjectStoreFailed, match="given up: a newer version came"):  # so that it is not posted
        await asyncio.to_thread(first.bring)
    assert await asyncio.to_thread(second.bring) == spec.manifest.size


async def test_a_trainer_that_ends_begins_no_further_file(server: ObjectServer, trained: Trained) -> None:
    """Nobody waits for an upload whose update is not posted any more."""
    staged, _ = trained.stage(0)
    trained.place.give_up()
    assert staged.bring is not None
    with pytest.raises(ObjectStoreFailed, match="or the trainer ends"):
        await asyncio.to_thread(staged.bring)
    assert not [key for key in server.objects() if key.endswith(".safetensors")]


# -- settings


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://x", "which no other process can read"), ("file:///w", "weights_dir is for folders"),
        ("/w", "weights_dir is for folders"), ("http://h/x", "must be s3://BUCKET"), ("s3://", "must be s3://BUCKET"),
        ("s3://b/../x", "must be s3://BUCKET"), ("simplecache::s3://bucket", "must be s3://BUCKET"),
        ("s3://key:hidden@bucket/x", "without credentials"), ("gs://bucket/x", "needs gcsfs: pip install gcsfs"),
    ],
)  # fmt: skip
def test_a_url_that_can_not_be_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match="weights_url: ") as refused:
        store(url)
    assert said in refused.value.message and "hidden" not in refused.value.message


# -- through the whole product


def test_weights_are_sampled_from_also_by_a_worker_that_comes_late(server: ObjectServer, tmp_path: Path) -> None:
    from steno.client.client import AsyncClient

    with running(tmp_path / "stack", ("--weights-url", URL)) as stack:
        transport = ObjectTransport(WeightsDifferences(tmp_path / "copies"), ObjectPlace(store(), "r", "default"))
        with Publisher(transport, [AsyncClient(stack.url)]) as sending:
            for step in (1, 2, 3):
                model = model_after(step)
                publication = sending.publish(PolicyVersion("run", step), *sources(model))
                update = sending.wait(publication, PATIENCE_S)
                assert (update.state, publication.failed) == ("done", {}), stack.logs()
                check_served(stack, f"trial-{step}", f"run/{step}", model)
            patches = publication.spec.manifest.patches
            assert len(patches) == 2 and publication.bytes_sent == patches[1].size
            check_late_worker(stack, model, "--weights-url", URL)
        assert SECRET not in stack.logs() and KEY_ID not in stack.logs()


def test_full_copies_alone_go_the_same_way(server: ObjectServer, side: Side, tmp_path: Path) -> None:
    place = ObjectPlace(store(), "a-run", "default")
    transport = ObjectTransport(WeightsCopies(tmp_path / "copies"), place)
    source = TensorSource({"x": torch.arange(5.0)}, [["x"]])
    staged = transport.stage(PolicyVersion("run", 1), source)
    assert staged.bring is not None and staged.bring() == staged.manifest.size
