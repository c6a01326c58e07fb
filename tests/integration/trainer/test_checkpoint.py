"""A trainer that was killed goes on from its checkpoint, bit by bit as one that was not (on a CPU)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.trainer.materials import SLOW_S, end, random_model, run_ranks, start_ranks
from tests.support.processes import until
from trainer_bridge.weights.copies import Copy

BATCHES = [{"seed": seed} for seed in (1, 2, 3, 4)]
TIMED = ("time/", "throughput/", "memory/")


def job(folder: Path, model: Path, **more: Any) -> dict[str, Any]:
    settings = {
        "model": str(model), "micro_batch_tokens": 64, "learning_rate": 1e-3, "warmup_steps": 3, "mini_batches": 2,
        "checkpoint_dir": str(folder / "checkpoints"), "checkpoints_kept": 1,
    }  # fmt: skip
    return {"settings": settings | more.pop("settings", {}), "batches": BATCHES, **more}


def kill_after_a_checkpoint(folder: Path, job: dict[str, Any]) -> None:
    """Let two ranks take steps until there is a checkpoint, and one step or more after it; then SIGKILL them."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job | {"forever": True}))
    process = start_ranks(2, "tests.integration.trainer.rank", str(folder))
    try:
        until(lambda: (folder / "saved").exists() or process.poll() is not None)
        assert process.poll() is None, process.stdout and process.stdout.read()
    finally:
        end(process)
    assert not (folder / "result.pt").exists()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_killed_and_resumed_is_as_if_never_killed(precision: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    options = {"settings": {"precision": precision}, "save_after": [2]}
    never = run_ranks(2, job(tmp_path / "never", model, **options), tmp_path / "never")
    kill_after_a_checkpoint(tmp_path / "killed", job(tmp_path / "killed", model, **options))
    resumed = run_ranks(
        2, job(tmp_path / "killed", model, settings={"precision": precision}, resume=True), tmp_path / "b"
    )
    assert [report["step"] for report in resumed["reports"]] == [3, 4]
    for ours, theirs in zip(resumed["reports"], never["reports"][2:], strict=True):
        assert ours["ledger"] == theirs["ledger"]
        assert untimed(ours["metrics"]) == untimed(theirs["metrics"])
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, never["weights"][name]), name
    assert resumed["random"][0] == never["random"][0] and torch.equal(resumed["random"][1], never["random"][1])
    assert resumed["ledger"] == never["ledger"]
    state = resumed["resumed"]
    assert (state.run_id, state.path, state.trained_groups) == ("r", (("a", 2),), ("g2",))


@pytest.mark.parametrize("during", ["_wrote", "_point_at"])
def test_killed_while_it_writes_a_checkpoint_the_one_before_counts(during: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    dying = job(tmp_path, model, save_after=[1, 2], die=[2, during])
    with pytest.raises(AssertionError):
        run_ranks(2, dying, tmp_path / "dying")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000001"
    resumed = run_ranks(2, job(tmp_path, model, resume=True, save_after=[2, 4]), tmp_path / "resumed")
    assert [report["step"] for report in resumed["reports"]] == [2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000004"]


def test_the_checkpoint_holds_the_full_model_and_older_ones_go(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", tied=True)
    found = run_ranks(2, job(tmp_path, model, save_after=[2, 4]), tmp_path / "job")
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(kept) == ["latest", "step-00000004"]
    [copy] = (tmp_path / "checkpoints" / "step-00000004").glob("weights-*")
    assert Copy.read(copy).version == "a/4"
    written = {name: tensor for shard in copy.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    assert written.keys() == found["weights"].keys()
    assert all(torch.equal(written[name], weight) for name, weight in found["weights"].items())
    loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, found["weights"]["model.embed_tokens.weight"])


def test_ranks_end_with_the_launcher_that_was_killed(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "job.json").write_text(json.dumps(job(tmp_path, model, save_after=[1], forever=True)))
    process = start_ranks(2, "tests.integration.trainer.rank", str(tmp_path))
    try:
        until(lambda: (tmp_path / "saved").exists() or process.poll() is not None)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=SLOW_S)
        assert (len(gone), alive) == (2, [])
    finally:
        end(process)


def test_a_checkpoint_of_another_run_or_shape_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    run_ranks(2, job(tmp_path, model, save_after=[4]), tmp_path / "job")
    with pytest.raises(AssertionError, match=r"BadCheckpoint.*ranks 2 in the checkpoint, 1 now"):
        run_ranks(1, job(tmp_path, model, resume=True), tmp_path / "other")
    with pytest.raises(AssertionError, match=r"BadCheckpoint.*run r in the checkpoint, another now"):
        run_ranks(2, job(tmp_path, model, resume=True, run="another"), tmp_path / "another")


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMED)}
