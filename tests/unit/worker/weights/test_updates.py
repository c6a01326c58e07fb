"""A worker's update from its first frame to its last: who is told what, when, and what serves meanwhile (I10)."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from steno.config.object_store import ObjectStore
from steno.contracts.errors import EngineFailed, ProtocolError, WeightsRefused
from steno.contracts.policy import UpdateSpec
from steno.contracts.wire.frames import Abandon, Apply, Chunk, Frame, ModelCard, Prepare, Progress
from steno_worker.engines.vllm_server.engine import VllmServerEngine
from steno_worker.interfaces import StagedUpdate
from steno_worker.metrics import WorkerMetrics
from steno_worker.temporary import TemporaryFolder
from steno_worker.weights import stage, staged_files
from steno_worker.weights import update_state as one_update
from steno_worker.weights.update_runner import UpdateRunner
from tests.support.waiting import until
from tests.support.weights.shards import digest, manifest_of, shard_bytes, spec, two_shards, write

SHARDS = two_shards()
DATA = {name: shard_bytes(tensors) for name, tensors in SHARDS.items()}
PROBE = {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0]}


class Engine:
    """Loads what it is told to, and scores as it is told to."""

    def __init__(self) -> None:
        self.version = "base/0"
        self.loaded: list[StagedUpdate] = []
        self.error: Exception | None = None
        self.scores = [-1.0, -2.01]
        self.folder: Path | None = None
        self.check_files = True
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.during: Callable[[], None] = lambda: None

    def cards(self) -> list[ModelCard]:
        return [ModelCard("m", 100, policy_version=self.version, vocabulary_size=60)]

    def checkpoint(self) -> Path | None:
        return self.folder

    async def load_weights(self, update: StagedUpdate) -> float:
        await self.may_load.wait()
        self.during()
        if self.error is not None:
            raise self.error
        assert (
            update.spec.transport == "nccl"
            or not self.check_files
            or {path.name for path in update.folder.iterdir()} == set(DATA)
        )
        self.loaded.append(update)
        self.version = update.version
        return 0.25

    async def score(self, token_ids: list[int]) -> list[float]:
        self.during()
        return self.scores


class Proxy:
    """One end that asks, and what it was told."""

    def __init__(self, bench: Bench) -> None:
        self.frames: list[Progress] = []
        self.streams = True
        self._bench = bench
        self._told = asyncio.Event()

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, Progress)
        assert frame.state != "receiving" or bool(frame.shard) is self.streams, "a proxy takes it for a broken protocol"
        self._bench.log.append(frame)
        self.frames.append(frame)
        self._told.set()

    def tell(self, frame: Frame) -> None:
        self._bench.updates.handle(frame, self.send)

    def prepare(self, spec: UpdateSpec, update_id: str = "u1") -> None:
        self.streams = spec.transport == "stream"
        self.tell(Prepare(update_id, spec.model_dump_json().encode()))

    async def until(self, state: str) -> Progress:
        async with asyncio.timeout(60):
            while not self.frames or self.frames[-1].state != state:
                self._told.clear()
                await self._told.wait()
        return self.frames[-1]

    async def upload(self, step: int = 1000, update_id: str = "u1", until: int = 10**9) -> None:
        """As far as credit goes, again and again, like a proxy that has the shards."""
        async with asyncio.timeout(60):
            while self.frames[-1].state == "receiving":
                last = self.frames[-1]
                if last.shard:
                    end = min(last.offset + last.credit, until)
                    for offset in range(last.offset, end, step):
                        data = DATA[last.shard][offset : min(offset + step, end)]
                        self.tell(Chunk(update_id, last.shard, offset, data, zlib.crc32(data)))
                    if end == until:
                        return
                self._told.clear()
                if self.frames[-1] is last:
                    await self._told.wait()


class Bench:
    def __init__(self, root: Path, objects: ObjectStore | None = None) -> None:
        self.engine = Engine()
        self.log: list[object] = []
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.root = root
        self.updates = UpdateRunner(
            self.engine,
            self.metrics,
            announce=self._announced,
            staging_dir=root,
            objects=objects,
            clock=lambda: 0.0,  # type: ignore[arg-type]
        )

    def _announced(self) -> None:
        self.log.append((self.updates.cards()[0].policy_version, self.updates.healthy))

    def proxy(self) -> Proxy:
        return Proxy(self)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    one = Bench(tmp_path / "staging")
    yield one
    await one.updates.close()


def folder_spec(tmp_path: Path, step: int = 1, **fields: object) -> UpdateSpec:
    manifest = write(tmp_path / f"weights-{step}", SHARDS)
    return spec(manifest, step, transport="filesystem", location=str(tmp_path / f"weights-{step}"), **fields)


def stream_spec(step: int = 1, **fields: object) -> UpdateSpec:
    return spec(manifest_of(SHARDS), step, **fields)


async def test_a_folder_is_staged_applied_proved_and_only_then_announced(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    update = folder_spec(tmp_path, probe=PROBE)
    proxy.prepare(update)
    ready = await proxy.until("ready")
    assert ready.received == update.manifest.size
    bench.engine.during = lambda: bench.log.append((bench.updates.cards()[0].policy_version, bench.updates.gate.shut))
    proxy.tell(Apply("u1"))
    served = await proxy.until("served")
    assert (served.pause_s, served.load_s) == (0.25, 0.0)
    # While it loads and while it is proved the cards name the old version, and nothing passes.
    assert [entry for entry in bench.log if isinstance(entry, tuple)] == [
        ("base/0", True),
        ("base/0", True),
        ("run/1", True),
    ]
    assert bench.log.index(("run/1", True)) < bench.log.index(served)
    assert not bench.updates.gate.shut
    assert bench.metric("steno_worker_updates_total", end="served") == 1


async def test_a_stream_is_received_as_far_as_credit_goes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_update, "CREDIT_BYTES", 1000)
    proxy = bench.proxy()
    proxy.prepare(stream_spec())
    first = await proxy.until("receiving")
    assert (first.shard, first.offset, first.credit, first.received) == ("a.safetensors", 0, 1000, 0)
    await proxy.upload(step=100)
    assert (await proxy.until("ready")).received == sum(map(len, DATA.values()))
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    await bench.updates.close()
    assert list(bench.root.iterdir()) == []  # what is loaded need not lie on the disk


async def test_more_than_was_asked_for_is_the_proxys_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_update, "CREDIT_BYTES", 1000)
    proxy = bench.proxy()
    proxy.prepare(stream_spec())
    await proxy.until("receiving")
    with pytest.raises(ProtocolError, match="credit"):
        proxy.tell(Chunk("u1", "a.safetensors", 0, DATA["a.safetensors"][:1001], 0))


async def test_two_proxies_stage_one_update_and_both_hear_of_it(bench: Bench) -> None:
    one, two = bench.proxy(), bench.proxy()
    one.prepare(stream_spec())
    two.prepare(stream_spec())
    await two.until("receiving")
    data = DATA["a.safetensors"][:500]
    for proxy in (one, two):  # both were asked for the same bytes; the second is told where the worker is
        proxy.tell(Chunk("u1", "a.safetensors", 0, data, zlib.crc32(data)))
    assert two.frames[-1].offset == 500
    await two.upload()
    await one.until("ready")
    await two.until("ready")
    bench.updates.forget(one.send)
    heard = len(one.frames)
    two.tell(Apply("u1"))
    one.tell(Apply("u1"))  # it is back
    await one.until("served")
    await two.until("served")
    assert len(bench.engine.loaded) == 1
    assert len(one.frames) > heard


async def test_a_cut_upload_goes_on_with_another_proxy(bench: Bench) -> None:
    one, two = bench.proxy(), bench.proxy()
    one.prepare(stream_spec())
    await one.until("receiving")
    await one.upload(until=1234)
    bench.updates.forget(one.send)
    two.prepare(stream_spec())
    assert (two.frames[-1].shard, two.frames[-1].offset) == ("a.safetensors", 1234)
    await two.upload()
    await two.until("ready")


async def test_a_damaged_chunk_fails_the_update_and_preparing_again_starts_over(bench: Bench) -> None:
    proxy = bench.proxy()
    proxy.prepare(stream_spec())
    await proxy.until("receiving")
    proxy.tell(Chunk("u1", "a.safetensors", 0, DATA["a.safetensors"][:10], 1))
    failed = await proxy.until("failed")
    assert (failed.code, "crc32" in failed.message) == ("weights_refused", True)
    proxy.prepare(stream_spec())
    await proxy.until("receiving")
    await proxy.upload()
    await proxy.until("ready")


async def test_a_corrupt_shard_is_refused_and_the_old_weights_go_on(bench: Bench, tmp_path: Path) -> None:
    update = folder_spec(tmp_path)
    path = tmp_path / "weights-1" / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    proxy = bench.proxy()
    proxy.prepare(update)
    failed = await proxy.until("failed")
    assert failed.code == "weights_refused"
    assert "b.safetensors" in failed.message and "digest" in failed.message
    assert (bench.updates.healthy, bench.updates.cards()[0].policy_version) == (True, "base/0")
    proxy.tell(Apply("u1"))
    assert proxy.frames[-1].state == "failed"
    assert bench.engine.loaded == []


async def test_weights_that_the_engine_refuses_leave_the_old_ones_serving(bench: Bench, tmp_path: Path) -> None:
    bench.engine.error = WeightsRefused("tensor 'x' is not of this model")
    proxy = bench.proxy()
    proxy.prepare(folder_spec(tmp_path, probe=PROBE))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    assert (await proxy.until("failed")).message == "tensor 'x' is not of this model"
    assert bench.updates.healthy and not bench.updates.gate.shut
    assert not [entry for entry in bench.log if isinstance(entry, tuple)]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (list(range(100)), "got 100 tokens, this worker's context is 100, one of them for an answer"),
        ([1, 60, 2], "got token id 60, this worker's vocabulary has 60"),
        ([1, -1, 2], "got token id -1, this worker's vocabulary has 60"),
    ],
)
async def test_a_probe_that_the_model_can_t_take_is_refused_before_anything_is_loaded(
    bench: Bench, tmp_path: Path, ids: list[int], words: str
) -> None:
    proxy = bench.proxy()
    proxy.prepare(folder_spec(tmp_path, probe={"token_ids": ids, "logprobs": [-1.0] * (len(ids) - 1)}))
    failed = await proxy.until("failed")
    assert (failed.code, words in failed.message) == ("weights_refused", True)
    assert bench.updates.healthy and not bench.updates.gate.shut and bench.engine.loaded == []
    longest = {"token_ids": list(range(10, 59)) * 2 + [59], "logprobs": [-1.0] * 98}
    proxy.prepare(folder_spec(tmp_path, 2, probe=longest), "u2")
    await proxy.until("ready")


@pytest.mark.parametrize("fields", [{}, {"probe": PROBE}])
async def test_an_upstreams_worker_refuses_before_it_asks_for_anything(bench: Bench, fields: dict[str, object]) -> None:
    bench.updates._engine = VllmServerEngine(None, "m", policy="default", context_tokens=100, max_streams=2)  # type: ignore[arg-type]
    proxy = bench.proxy()
    proxy.prepare(stream_spec(1, **fields))
    await asyncio.sleep(0)
    (failed,) = proxy.frames
    assert (failed.state, failed.code) == ("failed", "weights_refused")
    assert failed.message == "policy: weights of an upstream can't be updated"


@pytest.mark.parametrize("scores", [[-1.0, -2.2], [-1.0, float("nan")], [-1.0]])
async def test_a_failed_probe_makes_the_worker_unhealthy_until_it_has_caught_up(
    bench: Bench, tmp_path: Path, scores: list[float]
) -> None:
    proxy = bench.proxy()
    update = folder_spec(tmp_path, probe=PROBE)
    proxy.prepare(update)
    await proxy.until("ready")
    bench.engine.scores = scores
    proxy.tell(Apply("u1"))
    await proxy.until("failed")
    assert bench.log[-1] == ("base/0", False) and bench.updates.reason.startswith("probe: ")
    assert not bench.updates.healthy
    assert bench.metric("steno_worker_weights_proved") == 0
    with pytest.raises(EngineFailed, match="the loaded weights are invalid"):  # what was sampled by them does not leave
        await bench.updates.gate.passed()
    bench.engine.scores = [-1.0, -2.0]
    proxy.prepare(update)
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    assert bench.updates.healthy and not bench.updates.gate.shut
    assert bench.metric("steno_worker_weights_proved") == 1


async def test_a_load_that_breaks_half_way_condemns_the_weights(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    proxy.prepare(folder_spec(tmp_path, 1))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    bench.engine.error = EngineFailed("a worker process is gone")
    proxy.prepare(folder_spec(tmp_path, 2), "u2")
    await proxy.until("ready")
    proxy.tell(Apply("u2"))
    assert (await proxy.until("failed")).code == "engine_failed"
    assert not bench.updates.healthy
    # Nor does it serve any more what it served before: asked to, it loads it again.
    bench.engine.error = None
    proxy.prepare(folder_spec(tmp_path, 1))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    assert len(bench.engine.loaded) == 2 and bench.updates.healthy


async def test_a_newer_update_takes_the_place_of_one_that_is_not_applied(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    proxy.prepare(stream_spec(1))
    await proxy.until("receiving")
    proxy.prepare(folder_spec(tmp_path, 2), "u2")
    ready = await proxy.until("ready")
    assert ready.update_id == "u2"
    (failed,) = [frame for frame in proxy.frames if frame.state == "failed"]
    assert (failed.update_id, "superseded by run/2" in failed.message) == ("u1", True)
    proxy.prepare(stream_spec(1))  # a proxy that has not heard of it
    assert proxy.frames[-1].state == "failed" and "superseded by run/2" in proxy.frames[-1].message
    proxy.tell(Apply("u2"))
    await proxy.until("served")


async def test_an_update_is_prepared_while_another_is_loaded(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    bench.engine.may_load.clear()
    proxy.prepare(folder_spec(tmp_path, 1))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    proxy.prepare(folder_spec(tmp_path, 2), "u2")
    await proxy.until("ready")
    proxy.tell(Apply("u2"))
    bench.engine.may_load.set()
    while proxy.frames[-1].update_id != "u2" or proxy.frames[-1].state != "served":
        await asyncio.sleep(0)
    assert [update.version for update in bench.engine.loaded] == ["run/1", "run/2"]
    assert bench.updates.cards()[0].policy_version == "run/2"


async def test_what_is_served_already_is_said_at_once(bench: Bench, tmp_path: Path) -> None:
    proxy, other = bench.proxy(), bench.proxy()
    update = folder_spec(tmp_path)
    proxy.prepare(update)
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    for update_id in ("u1", "another-id"):
        other.prepare(update, update_id)
        assert (other.frames[-1].update_id, other.frames[-1].state) == (update_id, "served")
    changed = update.model_copy(deep=True)
    changed.manifest.tensors[0].digest = digest(b"else")
    other.prepare(changed, "third-id")
    assert other.frames[-1].state == "failed" and "known with other digests" in other.frames[-1].message
    assert len(bench.engine.loaded) == 1


async def test_an_abandoned_update_leaves_nothing(bench: Bench) -> None:
    proxy = bench.proxy()
    proxy.prepare(stream_spec())
    await proxy.until("receiving")
    proxy.tell(Abandon("u1"))
    proxy.tell(Abandon("u1"))
    proxy.tell(Chunk("u1", "a.safetensors", 0, b"late", 0))
    proxy.tell(Apply("u1"))
    assert (proxy.frames[-1].state, proxy.frames[-1].code) == ("failed", "not_found")
    await bench.updates.close()
    assert list(bench.root.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"policy": "other"}, "policy: got 'other', this worker serves default"),
        ({"probe": {"token_ids": [1, 2, 3], "logprobs": [-1.0]}}, "probe.logprobs"),
    ],
)
async def test_an_update_that_is_not_for_this_worker_names_the_field(
    bench: Bench, fields: dict[str, object], named: str
) -> None:
    proxy = bench.proxy()
    proxy.prepare(stream_spec(**fields))
    assert proxy.frames[-1].state == "failed" and named in proxy.frames[-1].message


async def test_a_spec_that_is_none_names_the_field(bench: Bench) -> None:
    proxy = bench.proxy()
    proxy.tell(Prepare("u1", b'{"lineage": "r", "step": -1}'))
    assert proxy.frames[-1].code == "invalid_request" and "spec." in proxy.frames[-1].message


async def refused(bench: Bench, proxy: Proxy, update: UpdateSpec, update_id: str) -> Progress:
    """Told to load weights whose probe does not pass. What is loaded afterwards is scored as before."""
    good = bench.engine.scores

    def score() -> None:
        bench.engine.scores = [-1.0, -5.0] if bench.engine.version == update.version else good

    bench.engine.during = score
    proxy.prepare(update, update_id)
    if update.transport == "stream":
        await proxy.until("receiving")
        await proxy.upload(update_id=update_id)
    await proxy.until("ready")
    proxy.tell(Apply(update_id))
    return await proxy.until("failed")


async def idle(bench: Bench) -> None:
    """Until nothing is loaded any more."""
    async with asyncio.timeout(60):
        async with bench.updates._loading:
            pass


async def test_after_a_refusal_the_weights_of_before_are_loaded_and_proved_again(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    proxy.prepare(folder_spec(tmp_path, 1, probe=PROBE))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    stream = bench.updates.gate.era
    failed = await refused(bench, proxy, folder_spec(tmp_path, 2, probe=PROBE), "u2")
    assert "the trainer's setting is probe_tolerance" in failed.message and failed.code == "weights_refused"
    await idle(bench)
    assert [update.version for update in bench.engine.loaded] == ["run/1", "run/2", "run/1"]
    assert bench.updates.healthy and bench.updates.cards()[0].policy_version == "run/1"
    assert [entry for entry in bench.log if isinstance(entry, tuple)][-2:] == [("run/1", False), ("run/1", True)]
    await bench.updates.gate.passed("run/1")
    with pytest.raises(EngineFailed):  # what ran meanwhile may have tokens of the refused weights
        await bench.updates.gate.passed("run/1", stream)
    # The same again ends as it did, and costs nothing; weights that are right are taken.
    bench.engine.during = lambda: None
    proxy.prepare(folder_spec(tmp_path, 2, probe=PROBE), "u2")
    assert proxy.frames[-1].state == "failed" and len(bench.engine.loaded) == 3
    (other := bench.proxy()).prepare(stream_spec(2, probe=PROBE), "u2, another way")
    assert [frame.state for frame in other.frames] == ["failed"]
    proxy.prepare(folder_spec(tmp_path, 2, probe=PROBE | {"tolerance": 9.0}), "u2, of which more is let pass")
    await proxy.until("ready")
    proxy.prepare(folder_spec(tmp_path, 3, probe=PROBE), "u3")
    await proxy.until("ready")
    proxy.tell(Apply("u3"))
    await proxy.until("served")


async def test_the_first_refusal_leads_back_to_what_the_engine_was_started_from(bench: Bench, tmp_path: Path) -> None:
    bench.engine.folder = tmp_path / "model"
    write(bench.engine.folder, {"model.safetensors": {name: one for of in SHARDS.values() for name, one in of.items()}})
    bench.engine.check_files = False
    bench.engine.scores = [-3.0, -4.0]  # of the base, which is not what the trainer has
    proxy = bench.proxy()
    await refused(bench, proxy, folder_spec(tmp_path, 1, probe=PROBE), "u1")
    await idle(bench)
    assert [(update.version, update.folder) for update in bench.engine.loaded[1:]] == [("base/0", tmp_path / "model")]
    assert bench.updates.healthy and bench.updates.cards()[0].policy_version == "base/0"


async def test_what_was_streamed_last_stays_on_the_disk_to_go_back_to(bench: Bench) -> None:
    proxy = bench.proxy()
    proxy.prepare(stream_spec(1, probe=PROBE))
    await proxy.until("receiving")
    await proxy.upload()
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    await refused(bench, proxy, stream_spec(2, probe=PROBE), "u2")
    await idle(bench)
    assert [update.version for update in bench.engine.loaded] == ["run/1", "run/2", "run/1"] and bench.updates.healthy
    bench.engine.during = lambda: None
    proxy.prepare(stream_spec(3, probe=PROBE), "u3")
    await proxy.until("receiving")
    await proxy.upload(update_id="u3")
    await proxy.until("ready")
    proxy.tell(Apply("u3"))
    await proxy.until("served")
    await bench.updates._stager._streams.do(lambda: None)
    assert len(list(bench.root.iterdir())) == 1  # the copy of run/1 has gone


async def test_what_a_killed_worker_left_goes_before_the_room_is_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bench.updates._stager, "_staging_dir", None)
    killed = TemporaryFolder("staging")
    assert killed._held is not None
    killed._held.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if killed.path.exists() else 10**12))
    proxy = bench.proxy()
    proxy.prepare(stream_spec())
    await proxy.until("receiving")
    await proxy.upload()
    await proxy.until("ready")
    await bench.updates.close()
    assert list(tmp_path.iterdir()) == []


async def test_nccl_leaves_nothing_to_go_back_to(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    manifest = manifest_of(SHARDS).model_copy(update={"shards": []})
    specs = [spec(manifest, step, transport="nccl", location="{}", probe=PROBE) for step in (1, 2)]
    proxy = bench.proxy()
    proxy.prepare(specs[0])
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    await proxy.until("served")
    await refused(bench, proxy, specs[1], "u2")
    await idle(bench)
    assert not bench.updates.healthy and "can't roll back to run/1: nccl leaves no copy of the weights" in caplog.text


async def test_a_small_difference_everywhere_is_refused_where_the_probe_bounds_the_mean(
    bench: Bench, tmp_path: Path
) -> None:
    count = 20
    logprobs = [-1.0] * count
    bounded = {"token_ids": [1] * (count + 1), "logprobs": logprobs, "tolerance": 1.0, "mean_tolerance": 0.05}
    proxy = bench.proxy()
    bench.engine.scores = [-1.06] * count
    for step, probe in ((1, bounded), (2, {**bounded, "mean_tolerance": None, "p90_tolerance": 0.05})):
        proxy.prepare(folder_spec(tmp_path, step, probe=probe), f"u{step}")
        await proxy.until("ready")
        proxy.tell(Apply(f"u{step}"))
        assert "differ by 0.06 on average" in (await proxy.until("failed")).message
    bench.engine.scores = [-1.5, *logprobs[1:]]  # one token of many: that is what the largest is for
    proxy.prepare(folder_spec(tmp_path, 3, probe=bounded), "u3")
    await proxy.until("ready")
    proxy.tell(Apply("u3"))
    await proxy.until("served")


async def test_weights_without_a_probe_must_give_numbers(bench: Bench, tmp_path: Path) -> None:
    proxy = bench.proxy()
    bench.engine.scores = [float("nan")] * 7
    proxy.prepare(folder_spec(tmp_path))
    await proxy.until("ready")
    proxy.tell(Apply("u1"))
    assert "log-probabilities are NaN or infinite" in (await proxy.until("failed")).message


async def test_a_pipe_in_the_place_of_a_shard_is_refused(bench: Bench, tmp_path: Path) -> None:
    update = folder_spec(tmp_path)
    path = tmp_path / "weights-1" / "b.safetensors"
    path.unlink()
    os.mkfifo(path)
    proxy = bench.proxy()
    proxy.prepare(update)
    failed = await proxy.until("failed")
    assert "b.safetensors can't be read: it is no regular file" in failed.message


async def test_a_folder_that_hangs_holds_up_no_later_update(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = staged_files.open_regular, threading.Event()

    def hanging(path: Path) -> FileIO:
        if path.parent.name == "weights-1":
            answers.wait()
        return real(path)

    monkeypatch.setattr(staged_files, "open_regular", hanging)
    proxy = bench.proxy()
    try:
        proxy.prepare(folder_spec(tmp_path, 1))
        await proxy.until("receiving")
        proxy.prepare(folder_spec(tmp_path, 2), "u2")
        assert (await proxy.until("ready")).update_id == "u2"
        proxy.tell(Apply("u2"))
        await proxy.until("served")
        # Left alone, it is given up with its reason; and not more than some are left behind.
        monkeypatch.setattr(stage, "STUCK_S", 0.0)
        monkeypatch.setattr(stage, "REPORT_EVERY_S", 0.001)
        hangs = str(tmp_path / "weights-1")
        proxy.prepare(folder_spec(tmp_path, 3).model_copy(update={"location": hangs}), "u3")
        assert "nothing could be read" in (await proxy.until("failed")).message
        monkeypatch.setattr(stage, "MOST_LEFT", 2)
        other = bench.proxy()
        # That of run/2 has read all, and may not have ended yet.
        await until(lambda: sum(thread.runs for thread in bench.updates._stager._reading) == 2)
        other.prepare(folder_spec(tmp_path, 4), "u4")
        assert "2 earlier readings have not returned" in (await other.until("failed")).message
    finally:
        answers.set()
