"""A trainer's weights on their way through the whole product: a real proxy, real workers with the embedded engine, as processes.

The oracle of what a worker serves is what it samples: greedy tokens and their log-probabilities, against the trainer's model.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from steno.client.client import AsyncClient
from steno.contracts.policy import Update
from steno.models import TINY
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import PushFailed
from steno_trainer.weights import follow
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.files.differences import WeightsDifferences
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.source import ModelWeights
from steno_trainer.weights.stream import UploadClient, Uploader
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, _spawn, running
from tests.support.weights.probe import make_probe, probe_ids
from tests.unit.trainer.weights.models import qwen

PATIENCE_S = 180.0
"""The machine may be busy with other tests."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path / "stack", ()) as stack:
        yield stack


def model_after(steps: int) -> PreTrainedModel:
    """The worker's own model, moved: as a trainer's after so many steps."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * steps * torch.randn(parameter.shape, generator=generator))
    return model


def transport(kind: str, folder: Path, *, delta: bool = False) -> Transport:
    copies = WeightsDifferences(folder) if delta else WeightsCopies(folder)
    return FilesystemTransport(copies) if kind == "filesystem" else StreamTransport(copies)


def publisher(stack: Stack, how: Transport, **options: Any) -> Publisher:
    return Publisher(how, [AsyncClient(stack.url)], **options)


def sources(model: PreTrainedModel) -> tuple[ModelWeights, Any]:
    return ModelWeights(model, bucket_bytes=300_000), make_probe(model, probe_ids(model.config.vocab_size))


def versions(stack: Stack) -> dict[str, list[str]]:
    """version -> ids of the workers that serve it."""
    [policy] = stack.get("/policy")["items"] or [{"workers": {}}]
    return dict(policy["workers"])


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(60)


def restart_proxy(stack: Stack) -> None:
    """Where it was, knowing nothing."""
    log, command = stack.folder / "proxy.log", ["proxy", "--host", "127.0.0.1", "--port", str(stack.port)]
    stack.proxy = _spawn(log, sys.executable, *command)
    until(lambda: answers(stack.url + "/healthz"))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def check_served(stack: Stack, trial_id: str, version: str, model: PreTrainedModel) -> None:
    """One turn: its tokens are labelled with the version, and their log-probabilities are this model's."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 1.0}
    answer = httpx.post(stack.base_url(trial_id) + "/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text + stack.logs()
    [sample] = stack.get(f"/sessions/{trial_id}/samples")["items"]
    ids = torch.tensor([sample["token_ids"]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    sampled = [place for place, mask in enumerate(sample["loss_mask"]) if mask]
    assert sampled
    for place in sampled:
        expected = logprobs[place - 1, ids[0, place]].item()
        assert sample["sampling_logprobs"][place] == pytest.approx(expected, abs=1e-3)
    [turn] = stack.turns(trial_id)
    assert {span["version"] for span in turn["versions"]} == {version}


def check_late_worker(stack: Stack, model: PreTrainedModel, *options: str) -> None:
    """A worker that starts now gets version 3, and serves it alone once the first one has ended."""
    first = stack.workers[0]
    stack.start_worker("--worker-id", "late", *options, name="late")
    until(lambda: "late" in versions(stack).get("run/3", []))
    first.send_signal(signal.SIGTERM)
    first.wait(60)
    until(lambda: versions(stack) == {"run/3": ["late"]})
    check_served(stack, "late-trial", "run/3", model)


@pytest.mark.parametrize("kind", ["filesystem", "stream"])
def test_what_was_published_is_what_is_sampled_from(stack: Stack, tmp_path: Path, kind: str) -> None:
    with publisher(stack, transport(kind, tmp_path / "copies")) as sending:
        for step in (1, 2):
            model = model_after(step)
            publication = sending.publish(PolicyVersion("run", step), *sources(model))
            update = sending.wait(publication, PATIENCE_S)
            assert (update.state, publication.failed) == ("done", {}), stack.logs()
            [worker] = update.workers
            assert worker.state == "served" and worker.pause_s is not None and worker.load_s is not None
            check_served(stack, f"trial-{step}", f"run/{step}", model)
        if kind == "stream":
            assert publication.bytes_sent == publication.spec.manifest.size


@pytest.mark.parametrize("kind", ["filesystem", "stream"])
def test_weights_by_difference_are_sampled_from_also_by_a_worker_that_comes_late(
    stack: Stack, tmp_path: Path, kind: str
) -> None:
    sent: dict[int, int] = {}
    with publisher(stack, transport(kind, tmp_path / "copies", delta=True)) as sending:
        for step in (1, 2, 3):
            model = model_after(step)
            publication = sending.publish(PolicyVersion("run", step), *sources(model))
            update = sending.wait(publication, PATIENCE_S)
            assert (update.state, publication.failed) == ("done", {}), stack.logs()
            check_served(stack, f"trial-{step}", f"run/{step}", model)
            sent[step] = publication.bytes_sent
        manifest = publication.spec.manifest
        assert len(manifest.patches) == 2
        if kind == "stream":
            assert sent == {1: sum(shard.size for shard in manifest.shards)} | {
                step: patch.size for step, patch in zip((2, 3), manifest.patches, strict=True)
            }
        # It has nothing that a patch could go onto.
        check_late_worker(stack, model)
        if kind == "stream":
            assert publication.bytes_sent - sent[3] == manifest.size


def test_a_worker_that_comes_late_catches_up_from_the_copy_before_it_gets_traffic(stack: Stack, tmp_path: Path) -> None:
    model = model_after(3)
    with publisher(stack, StreamTransport(WeightsCopies(tmp_path / "copies"))) as sending:
        publication = sending.publish(PolicyVersion("run", 3), *sources(model))
        sending.wait(publication, PATIENCE_S)
        check_late_worker(stack, model)
        assert publication.bytes_sent == 2 * publication.spec.manifest.size


def test_an_update_that_nobody_could_take_reaches_the_worker_that_comes_afterwards(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "FAILED_PAUSE_S", 0.5)
    model = model_after(1)
    kill(stack.workers.pop())
    with publisher(stack, StreamTransport(WeightsCopies(tmp_path / "copies")), deadline_s=5.0) as sending:
        publication = sending.publish(PolicyVersion("run", 1), *sources(model))
        assert sending.wait(publication, PATIENCE_S).state == "failed"
        stack.start_worker("--worker-id", "back")
        until(lambda: versions(stack).get("run/1") == ["back"])
        check_served(stack, "after", "run/1", model)


def test_two_workers_are_brought_to_it_by_one_upload(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one shard, begun when both receive: a worker is sent again what it missed before."""
    serve = Uploader.serve

    async def once_both_receive(uploader: Uploader, client: UploadClient, update: Update) -> bool:
        both = [worker.state for worker in update.workers] == ["receiving", "receiving"]
        return await serve(uploader, client, update) if both or uploader.bytes_sent else False

    monkeypatch.setattr(Uploader, "serve", once_both_receive)
    stack.start_worker("--worker-id", "second", name="second")
    until(lambda: len(stack.get("/workers")["items"]) == 2)
    model = model_after(1)
    _, probe = sources(model)
    with publisher(stack, StreamTransport(WeightsCopies(tmp_path / "copies"))) as sending:
        publication = sending.publish(PolicyVersion("run", 1), ModelWeights(model), probe)
        update = sending.wait(publication, PATIENCE_S)
        assert [worker.state for worker in update.workers] == ["served", "served"]
        [shard] = publication.spec.manifest.shards
        assert publication.bytes_sent == shard.size


def test_a_proxy_killed_in_an_update_gets_it_again_when_it_is_back(tmp_path: Path) -> None:
    model = model_after(1)
    with (
        running(tmp_path / "stack", ("--worker-id", "w")) as stack,
        publisher(stack, StreamTransport(WeightsCopies(tmp_path / "copies"))) as sending,
    ):
        kill(stack.proxy)
        publication = sending.publish(PolicyVersion("run", 1), *sources(model))
        until(lambda: publication.trouble is not None)
        with pytest.raises(PushFailed, match="not accepted yet"):
            sending.wait(publication, 0.0)
        restart_proxy(stack)
        assert sending.wait(publication, PATIENCE_S).state == "done", stack.logs()
        # It kept nothing: killed again, it learns of the version from the publisher, and the worker keeps its weights.
        kill(stack.proxy)
        restart_proxy(stack)
        until(lambda: versions(stack).get("run/1") == ["w"])
        check_served(stack, "after", "run/1", model)


class Cut(AsyncClient):
    """A client that does something once in the middle of an upload: after its first piece of 100 kB."""

    def __init__(self, url: str, act: Callable[[], None]) -> None:
        super().__init__(url)
        self._acts = [act]

    async def upload_shard(self, update_id: str, name: str, offset: int, data: AsyncIterator[bytes]) -> int:  # type: ignore[override]
        async def pieces() -> AsyncIterator[bytes]:
            async for chunk in data:
                for start in range(0, len(chunk), 100_000):
                    yield chunk[start : start + 100_000]
                    if self._acts:
                        await asyncio.sleep(0.2)  # for the piece to get to the worker
                        await asyncio.to_thread(self._acts.pop())

        return await super().upload_shard(update_id, name, offset, pieces())


@pytest.mark.parametrize("victim", ["worker", "proxy"])
def test_whoever_is_killed_in_the_middle_of_an_upload_has_the_weights_in_the_end(tmp_path: Path, victim: str) -> None:
    model = model_after(1)
    arguments = ("--worker-id", "w", "--staging-dir", str(tmp_path / "staging"))
    with running(tmp_path / "stack", arguments) as stack:

        def act() -> None:
            if victim == "proxy":
                kill(stack.proxy)
                restart_proxy(stack)
            else:
                kill(stack.workers.pop())
                stack.start_worker(*arguments)

        with Publisher(StreamTransport(WeightsCopies(tmp_path / "copies")), [Cut(stack.url, act)]) as sending:
            publication = sending.publish(PolicyVersion("run", 1), *sources(model))
            sending.wait(publication, PATIENCE_S)
            until(lambda: versions(stack).get("run/1") == ["w"])
            check_served(stack, "after", "run/1", model)
            assert publication.failed == {}


def test_a_version_with_other_weights_is_refused_by_the_proxy(stack: Stack, tmp_path: Path) -> None:
    with publisher(stack, FilesystemTransport(WeightsCopies(tmp_path / "one"))) as sending:
        sending.wait(sending.publish(PolicyVersion("run", 1), *sources(model_after(1))), PATIENCE_S)
    with publisher(stack, FilesystemTransport(WeightsCopies(tmp_path / "other"))) as other:
        publication = other.publish(PolicyVersion("run", 1), *sources(model_after(2)))
        with pytest.raises(PushFailed, match="run/1"):
            other.wait(publication, PATIENCE_S)


def test_weights_of_another_model_are_refused_and_the_old_ones_go_on(stack: Stack, tmp_path: Path) -> None:
    model = model_after(1)
    with publisher(stack, FilesystemTransport(WeightsCopies(tmp_path))) as sending:
        sending.wait(sending.publish(PolicyVersion("run", 1), *sources(model)), PATIENCE_S)
        publication = sending.publish(PolicyVersion("run", 2), ModelWeights(qwen()), None)
        assert sending.wait(publication, PATIENCE_S).state == "failed"
        assert [why.split(":")[0] for why in publication.failed.values()] == ["weights_refused"]
        check_served(stack, "still", "run/1", model)
