"""Weights leave a model that ZeRO-3 has partitioned over two gloo ranks: equal, in step, within a bound; and training goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from steno.contracts.policy import Manifest
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.trainer.launching import fork, launch
from tests.support.weights.probe import make_probe, probe_ids
from tests.unit.trainer.weights.models import qwen

RANK = "tests.integration.weights.rank"


def run(
    start: Callable[[int, str, Path], None], folder: Path, do: list[str], bucket_bytes: int, **model: Any
) -> list[dict[str, Any]]:
    """What each rank saw."""
    qwen(**model).save_pretrained(folder / "model")
    job = {"model": str(folder / "model"), "bucket_bytes": bucket_bytes, "do": do}
    (folder / "job.json").write_text(json.dumps(job))
    start(2, RANK, folder)
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """Of a tied model of about 130 kB, in buckets of 20 kB."""
    return run(fork, folder, ["publish", "nccl", "copies", "changes", "failure"], 20_000, tied=True)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_copy_is_the_model_before_and_after_steps(folder: Path, seen: list[dict[str, Any]]) -> None:
    first, second, third = (Path(name) for name in seen[0]["copies"]["folders"])
    assert not first.exists(), "two copies are kept"
    start, expected = tensors(folder / "model"), torch.load(folder / "expected.pt")
    before, after = tensors(second), tensors(third)
    assert start.keys() == after.keys() == expected.keys() and "lm_head.weight" not in after
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    published = tensors(folder / "published" / "weights-run-0")
    assert all(torch.equal(published[name], start[name]) for name in start)


def test_both_ranks_write_and_know_the_same(seen: list[dict[str, Any]]) -> None:
    one, other = (rank["copies"] for rank in seen)
    assert one["plan"] == other["plan"] and one["digest"] == other["digest"]
    shards = len(one["plan"])
    assert shards > 4 and abs(len(one["written"]) - len(other["written"])) <= 3  # three copies
    assert not set(one["written"]) & set(other["written"])
    assert sorted(set(one["written"] + other["written"])) == [
        f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)
    ]


def test_what_changed_is_found_by_the_rank_that_wrote_it_and_makes_the_same_weights(
    folder: Path, seen: list[dict[str, Any]]
) -> None:
    one, other = (rank["changes"] for rank in seen)
    assert one["manifest"] == other["manifest"] and one["asked"] == other["asked"] == 0
    for changed, full in one["digests"]:
        assert changed == full
    manifest, shards = Manifest.model_validate(one["manifest"]), len(one["manifest"]["shards"])
    assert [len(patch.files) for patch in manifest.patches] == [shards, shards] and shards > 4
    assert not set(one["written"]) & set(other["written"]) and abs(len(one["written"]) - len(other["written"])) <= 2
    assert len(one["written"] + other["written"]) == 2 * shards


def test_training_goes_on_after_a_copy(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        losses = rank["copies"]["losses"]
        assert losses[2] < losses[0]


def test_one_ranks_failure_is_told_to_all_and_the_next_copy_works(folder: Path, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        told, version = rank["failure"]
        assert "rank 1" in told and "No space left" in told
        assert version == "run/0"
    assert [path.name for path in (folder / "failing").iterdir()] == ["weights-run-0"]


def test_all_ranks_hear_how_an_update_ended_and_one_alone_speaks(seen: list[dict[str, Any]]) -> None:
    assert [(rank["publish"]["state"], rank["publish"]["version"]) for rank in seen] == [("done", "run/0")] * 2
    assert seen[0]["publish"]["writers"] == seen[1]["publish"]["writers"] == [0, 1]  # one machine
    assert seen[0]["publish"]["calls"] > 0 and seen[1]["publish"]["calls"] == 0


def test_the_probe_of_a_partitioned_model_is_that_of_the_whole_one(folder: Path, seen: list[dict[str, Any]]) -> None:
    expected = make_probe(qwen(tied=True), probe_ids(64)).logprobs
    for rank in seen:
        assert rank["publish"]["probe"] == pytest.approx(expected, abs=1e-4)


def test_an_nccl_update_gathers_in_step_also_when_its_group_breaks(folder: Path, seen: list[dict[str, Any]]) -> None:
    one, other = (rank["nccl"] for rank in seen)
    assert one == other and one["state"] == "done"
    digests_and_two_attempts = 4
    assert len(one["passes"]) == digests_and_two_attempts and len({tuple(names) for names in one["passes"]}) == 1
    sent, start = torch.load(folder / "sent.pt"), tensors(folder / "model")
    assert sent.keys() == start.keys() and all(torch.equal(sent[name], start[name]) for name in start)


def test_a_copy_takes_the_memory_of_a_few_buckets_not_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = 4 << 20
    # What is freed goes back to the system at once, so that its count of pages is what is held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 18))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 18))
    seen = run(launch, tmp_path, ["memory"], bucket, layers=16, hidden=512, vocab=256)
    size = WeightsCopy.read(tmp_path / "memory" / "weights-run-0").manifest.size
    assert size > 100 << 20
    for rank in seen:
        assert rank["memory"]["gathered"] <= bucket and rank["memory"]["left"] == 0
        assert rank["memory"]["peak"] < 8 * bucket < size / 3, "gathered, copied, being written, and what gloo takes"
