"""An update is followed through whatever passes, and ended by what does not: restarts, cuts, refusals, late workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from steno.contracts.errors import BadRequest, Conflict, ObjectStoreFailed, Unreachable
from steno.contracts.policy import PatchEntry, Probe, UpdateSpec, Want, WorkerUpdate
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import PushFailed
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.follow import MAX_FAILED_PAUSE_S, MAX_PAUSE_S, Follower
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.source import ModelWeights
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport
from tests.support.waiting import until
from tests.unit.trainer.weights.fake_proxy import FakeProxy
from tests.unit.trainer.weights.models import qwen

Pauses = list[float]


def publication(transport: Transport) -> Publication:
    """Of a model of some 100 kB in several shards."""
    staged = transport.stage(PolicyVersion("run", 7), ModelWeights(qwen(), bucket_bytes=20_000))
    spec = UpdateSpec(
        lineage="run", step=7, transport=transport.name, location=staged.location, manifest=staged.manifest
    )
    return Publication(spec, staged.folder)


@pytest.fixture
def shared(tmp_path: Path) -> Publication:
    return publication(FilesystemTransport(WeightsCopies(tmp_path)))


@pytest.fixture
def streamed(tmp_path: Path) -> Publication:
    return publication(StreamTransport(WeightsCopies(tmp_path)))


@contextlib.asynccontextmanager
async def following(what: Publication, proxies: Sequence[FakeProxy]) -> AsyncIterator[Pauses]:
    pauses: Pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    task = asyncio.create_task(Follower(what, proxies, sleep=sleep, now=lambda: 0.0).run())
    try:
        yield pauses
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def whole(what: Publication) -> dict[str, bytes]:
    assert what.folder is not None
    return {shard.name: (what.folder / shard.name).read_bytes() for shard in what.spec.manifest.shards}


async def test_workers_are_told_where_the_copy_is(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.workers = [WorkerUpdate(worker_id="w1", state="served", pause_s=0.1)]
    async with following(shared, [proxy]):
        await until(lambda: shared.settled)
    assert proxy.specs["u-run/7"].location == str(shared.folder)
    assert shared.wait(0).state == "done" and shared.failed == {} and shared.push_s is not None


async def test_a_proxy_that_forgot_the_update_gets_it_again(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.state = "running"
    async with following(shared, [proxy]):
        await until(lambda: proxy.calls == ["post run/7", "get u-run/7"])
        proxy.forget()
        proxy.changed.set()
        await until(lambda: proxy.calls[2:4] == ["post run/7", "get u-run/7"])
        proxy.state = "done"
        proxy.changed.set()
        await until(lambda: shared.settled)


async def test_also_after_it_has_settled(shared: Publication) -> None:
    proxy = FakeProxy()
    async with following(shared, [proxy]):
        await until(lambda: shared.settled and len(proxy.calls) == 2)
        proxy.forget()
        proxy.changed.set()
        await until(lambda: proxy.calls.count("post run/7") == 2)


async def test_an_unreachable_proxy_is_asked_for_as_long_as_it_takes_with_growing_pauses(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.faults = [Unreachable("no answer") for _ in range(12)]
    async with following(shared, [proxy]) as pauses:
        await until(lambda: shared.settled)
    assert pauses[:12] == sorted(pauses[:12]) and max(pauses) == MAX_PAUSE_S
    assert shared.trouble is None


async def test_what_stands_in_the_way_is_said(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.state = "running"
    async with following(shared, [proxy]):
        await until(lambda: shared.update is not None)
        proxy.faults = [Unreachable("no answer from the proxy") for _ in range(100_000)]
        proxy.changed.set()
        await until(lambda: shared.trouble is not None)
        with pytest.raises(TimeoutError, match=r"running.*no answer from the proxy"):
            shared.wait(0.0)
        assert shared.outcome == "running: no answer from the proxy"


async def test_weights_are_known_to_be_uploaded_also_after_an_attempt_that_failed(shared: Publication) -> None:
    may_end, proxy, attempts = threading.Event(), FakeProxy(), list[int]()

    def bring() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise ObjectStoreFailed("503 slow down")
        return int(may_end.wait(60))

    publication = Publication(shared.spec, shared.folder, bring)
    async with following(publication, [proxy]):
        await until(lambda: len(attempts) == 2)
        assert publication.uploading and publication.outcome == "not accepted yet: 503 slow down"
        may_end.set()
        await until(lambda: publication.update is not None)
    assert proxy.specs and not publication.uploading


async def test_another_replica_is_asked_when_one_does_not_answer(shared: Publication) -> None:
    down, up = FakeProxy(), FakeProxy()
    down.faults = [Unreachable("no answer")]
    async with following(shared, [down, up]):
        await until(lambda: shared.settled)
    assert down.calls == ["post run/7"] and up.calls[0] == "post run/7"


async def test_a_refusal_ends_it_and_reaches_whoever_waits(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.faults = [Conflict("run/7 exists with other weights")]
    async with following(shared, [proxy]):
        await until(lambda: shared.settled)
        with pytest.raises(PushFailed, match=r"run/7: .*other weights"):
            shared.wait(0)
    assert proxy.calls == ["post run/7"]


async def test_a_newer_version_of_somebody_else_ends_it(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.state = "superseded"
    async with following(shared, [proxy]):
        await until(lambda: shared.settled)
    assert shared.wait(0).state == "superseded" and proxy.calls == ["post run/7"]


async def test_workers_that_failed_are_named_until_they_have_caught_up(
    shared: Publication, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = FakeProxy()
    proxy.workers = [WorkerUpdate(worker_id="w2", state="failed", error="weights_refused: lm_head.weight")]
    async with following(shared, [proxy]):
        await until(lambda: shared.settled)
        assert shared.failed == {"w2": "weights_refused: lm_head.weight"}
        proxy.workers = [WorkerUpdate(worker_id="w2", state="served")]
        proxy.changed.set()
        await until(lambda: shared.failed == {})
    assert "w2" in caplog.text


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("weights_refused: shard patch-001-00000.bin has digest 0 (digest)", True),
        ("weights_refused: probe: log-probabilities differ by 3 on average", False),
        ("worker_lost: the worker went away", False),
    ],
)
async def test_patches_that_were_refused_stay_so_when_the_proxy_tries_again(
    shared: Publication, error: str, refused: bool
) -> None:
    manifest = shared.spec.manifest
    manifest.patches = [PatchEntry(before="0" * 32, after=manifest.digest, files=manifest.shards)]
    proxy = FakeProxy()
    proxy.state, proxy.workers = "failed", [WorkerUpdate(worker_id="w", state="failed", error=error)]
    async with following(shared, [proxy]):
        await until(lambda: shared.settled)
        proxy.state, proxy.workers = "running", [WorkerUpdate(worker_id="w", state="receiving")]
        await until(lambda: shared.update is not None and shared.update.state == "running")
        assert shared.patches_refused is refused


async def test_an_update_that_no_worker_took_is_posted_again_after_growing_pauses(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.state = "failed"
    async with following(shared, [proxy]) as pauses:
        await until(lambda: proxy.calls.count("post run/7") >= 7)
        assert shared.wait(0).state == "failed"
        assert pauses[:6] == [15.0, 30.0, 60.0, 120.0, 240.0, MAX_FAILED_PAUSE_S]
        proxy.state = "running"  # a worker is back, and loads
        await until(lambda: shared.update is not None and shared.update.state == "running")
        assert shared.wait(0).state == "failed"
        proxy.state = "done"
        proxy.changed.set()
        await until(lambda: shared.wait(0).state == "done")


async def test_all_bytes_are_uploaded_as_workers_want_them(streamed: Publication) -> None:
    proxy = FakeProxy()
    posted = proxy.post_update

    async def post(spec: UpdateSpec):
        view = await posted(spec)
        proxy.ask_for_everything(view.update_id)
        return proxy._view(view.update_id)

    proxy.post_update = post  # type: ignore[method-assign]
    async with following(streamed, [proxy]):
        await until(lambda: proxy.received == whole(streamed))
    assert streamed.bytes_sent == streamed.spec.manifest.size


async def test_an_upload_goes_on_where_it_was_cut(streamed: Publication) -> None:
    proxy = FakeProxy()

    def cut(name: str, offset: int) -> int:
        proxy.faults = [Unreachable("the connection was cut")] * 3
        proxy.take = lambda name, offset: 7000
        return 1000

    proxy.take = cut
    async with following(streamed, [proxy]):
        await until(lambda: len(proxy.calls) == 2)
        proxy.ask_for_everything("u-run/7")
        await until(lambda: proxy.received == whole(streamed))
    assert not proxy.faults and any(call.endswith(" 1000") for call in proxy.calls), (
        "it was cut, and gone on from there"
    )


async def test_a_late_worker_gets_all_after_the_update_has_settled(streamed: Publication) -> None:
    proxy = FakeProxy()
    async with following(streamed, [proxy]):
        await until(lambda: streamed.settled)
        for _ in range(2):
            await until(lambda: not proxy.changed.is_set())
            proxy.ask_for_everything("u-run/7")
            await until(lambda: proxy.received == whole(streamed))


async def test_bytes_that_nobody_wants_any_more_are_no_failure(streamed: Publication) -> None:
    proxy = FakeProxy()
    async with following(streamed, [proxy]):
        await until(lambda: len(proxy.calls) == 2)
        proxy.refusals = [Conflict("that worker is further on")]
        proxy.ask_for_everything("u-run/7")
        await until(lambda: proxy.received == whole(streamed))
    assert streamed.wait(0).state == "done"


async def test_a_want_that_can_not_be_served_ends_it_by_name(streamed: Publication) -> None:
    proxy = FakeProxy()
    proxy.wants = [Want(shard="other.safetensors", offset=0)]
    async with following(streamed, [proxy]):
        await until(lambda: streamed.settled)
        with pytest.raises(PushFailed, match=r"byte 0 of other\.safetensors"):
            streamed.wait(0)


async def test_nothing_moving_is_no_busy_loop(streamed: Publication) -> None:
    proxy = FakeProxy()
    proxy.take = lambda name, offset: 0
    async with following(streamed, [proxy]) as pauses:
        await until(lambda: len(proxy.calls) == 2)
        proxy.ask_for_everything("u-run/7")
        await until(lambda: MAX_PAUSE_S in pauses)


@pytest.mark.parametrize("field", ["probe.p90_tolerance", "probe.mean_tolerance"])
async def test_a_proxy_of_an_earlier_release_gets_the_probe_that_it_knows(shared: Publication, field: str) -> None:
    proxy = FakeProxy()
    proxy.faults = [BadRequest(f"{field}: extra inputs are not permitted", field=field)]
    given = Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1.0, p90_tolerance=0.15, mean_tolerance=0.05)
    publication = Publication(shared.spec.model_copy(update={"probe": given}), shared.folder)
    async with following(publication, [proxy]):
        await until(lambda: publication.settled)
    (told,) = proxy.specs.values()
    assert told.probe is not None
    assert told.probe.model_dump() == {"token_ids": [1, 2], "logprobs": [-1.0], "tolerance": 1.0}


async def test_what_else_a_proxy_refuses_of_a_probe_stays_refused(shared: Publication) -> None:
    proxy = FakeProxy()
    proxy.faults = [
        BadRequest("probe.logprobs: must have one entry for each token but the first", field="probe.logprobs")
    ]
    given = Probe(token_ids=[1, 2], logprobs=[-1.0], mean_tolerance=0.05)
    publication = Publication(shared.spec.model_copy(update={"probe": given}), shared.folder)
    await Follower(publication, [proxy]).run()
    assert publication.outcome.startswith("refused") and not proxy.specs
