"""A trainer that was killed goes on from its checkpoint, bit by bit as one that was not (on a CPU)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from steno_trainer.data.ledger import Ledger
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.trainer.launching import RANK, end, run_ranks, running_ranks, start_ranks
from tests.integration.trainer.materials import random_batch, random_model
from tests.integration.trainer.reference import Reference
from tests.support.programs.processes import SLOW_S, until

BATCHES = [{"seed": seed} for seed in (1, 2, 3, 4)]
TIMED = ("time/", "throughput/", "memory/")
PLAIN = {
    "precision": "float32", "warmup_steps": 0, "mini_batches": 1, "adam_epsilon": 1e-3, "max_grad_norm": 0.0,
    "mismatch": "masked", "entropy_bonus": 0.01,
}  # fmt: skip
"""As one plain process trains (`Reference`)."""


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
    with running_ranks(2, RANK, folder) as ranks:
        until(lambda: (folder / "saved").exists() or any(rank.poll() is not None for rank in ranks))
        assert [rank.poll() for rank in ranks] == [None, None], (folder / "said").read_text()
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
    with pytest.raises(AssertionError, match=f"ranks ended with.*{-signal.SIGKILL}"):
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
    assert WeightsCopy.read(copy).version == "a/4"
    written = {name: tensor for shard in copy.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    assert written.keys() == found["weights"].keys()
    assert all(torch.equal(written[name], weight) for name, weight in found["weights"].items())
    loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, found["weights"]["model.embed_tokens.weight"])


def test_ranks_of_torchrun_are_as_forked_ones_and_end_with_it_when_it_is_killed(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    given = job(tmp_path, model, settings=PLAIN, save_after=[1], forever=True)
    (tmp_path / "job.json").write_text(json.dumps(given))
    process = start_ranks(2, RANK, str(tmp_path))
    try:
        until(lambda: (tmp_path / "saved").exists() or process.poll() is not None)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=SLOW_S)
        assert (len(gone), alive) == (2, [])
    finally:
        end(process)
    [copy] = (tmp_path / "checkpoints" / "step-00000001").glob("weights-*")
    written = {name: tensor for shard in copy.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    plain = Reference(model, learning_rate=1e-3, epsilon=1e-3)
    batch = random_batch(**BATCHES[0])
    plain.step(batch, [range(len(batch.rows))])
    assert written.keys() == plain.weights().keys()
    for name, weight in plain.weights().items():
        assert torch.allclose(written[name].float(), weight.float(), rtol=1e-4, atol=2e-6), name


def test_any_number_of_ranks_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The optimizer's state is the same bits on other ranks, and the weights in the end are those of one plain process."""
    model = random_model(tmp_path / "model")
    plain = Reference(model, learning_rate=1e-3, epsilon=1e-3)
    ended: dict[str, list[torch.Tensor]] = {}
    ledger = Ledger()
    for step, ranks in enumerate((2, 1, 2, 4), 1):
        more: dict[str, Any] = {"settings": PLAIN, "resume": True, "states": True, "save_after": [step]}
        given = job(tmp_path, model, **more) | {"batches": BATCHES[:step]}
        found = run_ranks(ranks, given, tmp_path / f"{step}-on-{ranks}")
        if ended:
            begun, ended_now = found["states"]
            assert begun.keys() == ended.keys() and len(begun) > 10
            for name, tensors in begun.items():
                assert all(map(torch.equal, tensors, ended[name])), name
            assert found["resumed"].path == (("a", step - 1),) and found["resumed"].trained_groups == (f"g{step - 1}",)
        else:
            [ended_now] = found["states"]
        ended = ended_now
        assert [report["step"] for report in found["reports"]] == [step]
        assert {float(steps) for *_, steps in ended.values()} == {step}
        batch = random_batch(**BATCHES[step - 1])
        plain.step(batch, [range(len(batch.rows))])
        ledger.add(Ledger.from_bytes(found["reports"][0]["ledger"]))
        assert found["ledger"] == ledger.to_bytes()
    for name, weight in plain.weights().items():
        assert torch.allclose(found["weights"][name], weight.float(), atol=1e-5), name


def test_another_model_of_the_same_shape_is_refused_by_name_wherever_the_run_s_own_lies(tmp_path: Path) -> None:
    """By any number of ranks. A record of a release before names no weights, and is read as it was then."""
    model, other = random_model(tmp_path / "model"), random_model(tmp_path / "other", seed=1)
    written = run_ranks(2, job(tmp_path, model, settings=PLAIN, save_after=[4]), tmp_path / "written")
    before = tmp_path / "before"
    shutil.copytree(tmp_path / "checkpoints", before)
    [state] = before.glob("step-*/state.msgpack")
    record = msgspec.msgpack.decode(state.read_bytes())
    older_record = {name: value for name, value in record.items() if name not in ("model", "begun_from")}
    state.write_bytes(msgspec.msgpack.encode(older_record))

    settings = PLAIN | {"checkpoint_dir": str(before)}
    refused = [[str(tmp_path / "checkpoints"), "r"]]
    older = run_ranks(1, job(tmp_path, other, settings=settings, resume=True, refused=refused), tmp_path / "older")
    assert (
        f"model: got {other} (weights " in older["refusals"][0] and f"must be {model} (weights" in older["refusals"][0]
    )
    moved = model.rename(tmp_path / "moved")
    found = run_ranks(1, job(tmp_path, moved, settings=PLAIN, resume=True), tmp_path / "found")
    for one in (older, found):
        assert one["resumed"].path == (("a", 4),)
        assert all(torch.equal(weight, written["weights"][name]) for name, weight in one["weights"].items())


def test_what_an_older_release_wrote_is_read_by_as_many_ranks_and_runs_no_code(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    settings = {"precision": "bfloat16"}
    given = job(tmp_path, model, settings=settings, save_after=[4], by_deepspeed=True, states=True)
    [ended] = run_ranks(1, given, tmp_path / "old")["states"]
    whole, ran = tmp_path / "checkpoints", tmp_path / "ran"
    files = sorted(path.relative_to(whole) for path in whole.glob("step-*/zero/*.pt"))
    assert len(files) == 2
    attacked = [tmp_path / f"attacked-{number}" for number, _ in enumerate(files)]
    for root, file in zip(attacked, files, strict=True):
        shutil.copytree(whole, root)
        torch.save({"module": _Program(str(ran))}, root / file)
        torch.load(root / file, weights_only=False)
        ran.rmdir()  # or it is no program
    of_two = tmp_path / "of-two"
    shutil.copytree(whole, of_two)
    [state] = of_two.glob("step-*/state.msgpack")
    state.write_bytes(msgspec.msgpack.encode({**msgspec.msgpack.decode(state.read_bytes()), "ranks": 2}))
    refused = [[str(whole), "another"], [str(of_two), "r"], *([str(root), "r"] for root in attacked)]
    again = job(tmp_path, model, settings=settings, resume=True, states=True, refused=refused)
    found = run_ranks(1, again, tmp_path / "new")
    another, two, *attacks = found["refusals"]
    assert "run r in the checkpoint, another now" in another
    assert "wrote it with 2 ranks, and only as many can read it; there are 1 now" in two
    assert len(attacks) == 2 and all("other objects than tensors" in attack for attack in attacks)
    assert not ran.exists()
    begun, _ = found["states"]
    for name, tensors in begun.items():
        assert all(map(torch.equal, tensors, ended[name])), name


class _Program:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMED)}
