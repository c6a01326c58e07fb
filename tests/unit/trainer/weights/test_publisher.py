"""The publisher: training goes on while weights travel, only the newest version is followed, and all ranks hear how it ended."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path, PurePosixPath

import pytest
import torch

from steno.contracts.errors import Conflict
from steno.contracts.policy import Probe
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import CopyFailed, PushFailed
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.source import ModelWeights
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport
from tests.unit.trainer.weights.fake_proxy import FakeProxy
from tests.unit.trainer.weights.models import qwen

PATIENCE_S = 60.0


def at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def test_a_version_is_published_and_what_workers_load_is_the_model(tmp_path: Path) -> None:
    proxy, model = FakeProxy(), qwen()
    probe = Probe(token_ids=[1, 2], logprobs=[-1.0])
    with Publisher(
        FilesystemTransport(WeightsCopies(tmp_path)), [proxy], policy="p", run_id="r", kv="keep"
    ) as publisher:
        publication = publisher.publish(at(3), ModelWeights(model), probe, parent=PolicyVersion("before", 3))
        assert publisher.wait(publication, PATIENCE_S).state == "done"
    spec = proxy.specs["u-run/3"]
    assert (spec.version, spec.parent, spec.policy, spec.run_id, spec.kv) == ("run/3", "before/3", "p", "r", "keep")
    assert spec.probe == probe and Path(spec.location).is_absolute()
    assert len(spec.manifest.tensors) == len(model.state_dict())


def test_workers_may_see_the_folder_elsewhere(tmp_path: Path) -> None:
    proxy = FakeProxy()
    transport = FilesystemTransport(WeightsCopies(tmp_path), seen_as=PurePosixPath("/mnt/weights"))
    with Publisher(transport, [proxy]) as publisher:
        publisher.wait(publisher.publish(at(3), ModelWeights(qwen())), PATIENCE_S)
    assert proxy.specs["u-run/3"].location == "/mnt/weights/weights-run-3"


def test_publish_returns_while_workers_are_still_loading_and_the_model_may_change(tmp_path: Path) -> None:
    proxy, model = FakeProxy(), qwen()
    proxy.state = "running"
    with Publisher(StreamTransport(WeightsCopies(tmp_path)), [proxy]) as publisher:
        publication = publisher.publish(at(1), ModelWeights(model))
        with torch.no_grad():
            model.lm_head.weight.zero_()
        with pytest.raises(PushFailed, match="run/1 is "):
            publisher.wait(publication, 0.0)
        assert not publication.settled


def test_a_newer_version_takes_the_place_of_one_that_is_still_running(tmp_path: Path) -> None:
    proxy, model = FakeProxy(), qwen()
    proxy.state = "running"
    posted = threading.Event()
    post = proxy.post_update

    async def post_and_say(spec):
        view = await post(spec)
        posted.set()
        return view

    proxy.post_update = post_and_say  # type: ignore[method-assign]
    with Publisher(FilesystemTransport(WeightsCopies(tmp_path)), [proxy]) as publisher:
        older = publisher.publish(at(1), ModelWeights(model))
        assert posted.wait(PATIENCE_S)
        proxy.state = "done"
        with torch.no_grad():
            model.lm_head.weight.zero_()
        newer = publisher.publish(at(2), ModelWeights(model))
        assert publisher.wait(newer, PATIENCE_S).version == "run/2"
        with pytest.raises(PushFailed, match="replaced by a newer update"):
            publisher.wait(older, PATIENCE_S)


def test_a_refusal_is_everybodys(tmp_path: Path) -> None:
    proxy = FakeProxy()
    proxy.faults = [Conflict("known with other weights")]
    with Publisher(FilesystemTransport(WeightsCopies(tmp_path)), [proxy]) as publisher:
        publication = publisher.publish(at(1), ModelWeights(qwen()))
        with pytest.raises(PushFailed, match="known with other weights"):
            publisher.wait(publication, PATIENCE_S)


def test_a_version_is_never_published_with_other_weights(tmp_path: Path) -> None:
    proxy = FakeProxy()
    with Publisher(FilesystemTransport(WeightsCopies(tmp_path)), [proxy]) as publisher:
        publisher.wait(publisher.publish(at(1), ModelWeights(qwen(seed=1))), PATIENCE_S)
        again = publisher.publish(at(1), ModelWeights(qwen(seed=1)))
        assert publisher.wait(again, PATIENCE_S).state == "done"
        with pytest.raises(CopyFailed, match="other weights"):
            publisher.publish(at(1), ModelWeights(qwen(seed=2)))


def test_a_surprise_in_the_thread_reaches_whoever_waits(tmp_path: Path) -> None:
    proxy = FakeProxy()
    proxy.faults = [RuntimeError("a bug")]
    with Publisher(FilesystemTransport(WeightsCopies(tmp_path)), [proxy]) as publisher:
        publication = publisher.publish(at(1), ModelWeights(qwen()))
        with pytest.raises(PushFailed, match="RuntimeError: a bug"):
            publisher.wait(publication, PATIENCE_S)


def test_clients_are_opened_and_closed_in_the_thread_that_uses_them(tmp_path: Path) -> None:
    class Counted(FakeProxy):
        loops: set[int]
        closed = False

        async def __aenter__(self) -> Counted:
            self.loops = {id(asyncio.get_running_loop())}
            return self

        async def __aexit__(self, *_: object) -> None:
            self.loops.add(id(asyncio.get_running_loop()))
            self.closed = True

    proxy = Counted()
    publisher = Publisher(FilesystemTransport(WeightsCopies(tmp_path)), [proxy])
    publisher.wait(publisher.publish(at(1), ModelWeights(qwen())), PATIENCE_S)
    publisher.close()
    publisher.close()
    assert proxy.closed and len(proxy.loops) == 1
