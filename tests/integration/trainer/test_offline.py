"""`steno train --records`: steps on the CPU over exported samples, without a proxy. What is rewarded becomes likelier, and what
other rewards prefer becomes so instead."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.contracts.records import Sample, readable
from tests.integration.trainer.launching import fork
from tests.integration.trainer.materials import random_model
from tests.unit.trainer.recorded import Recording, session

GROUPS = 4


def recorded(folder: Path, better: int) -> list[Sample]:
    """Groups of two trials, of which number `better` has the reward; the tokens are the same whichever it is. Recorded are the
    log-probabilities of the weights that the training begins with, under versions of another run."""
    found = []
    model = AutoModelForCausalLM.from_pretrained(folder)
    for group in range(GROUPS):
        for trial in range(2):
            recording = Recording(10 * group + trial)
            first = recording.turn(None, 4, 6, version=f"elsewhere/{80 + group}")
            recording.turn(first, 3, 6, version=f"elsewhere/{81 + group}")
            scored = session(f"g{group}.{trial}", f"g{group}", float(trial == better))
            for sample in recording.samples(scored):
                logprobs = _logprobs(model, sample)
                found.append(sample.model_copy(update={"sampling_logprobs": logprobs.numpy().tobytes()}))
    return found


def _logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """float32[T], NaN where nothing was sampled."""
    ids = torch.tensor(sample.to_numpy().token_ids.astype("int64"))
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float()
    of_next = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
    every = torch.cat([torch.tensor([torch.nan]), of_next])
    return torch.where(torch.tensor(sample.to_numpy().loss_mask.copy()), every, torch.nan)


def train(folder: Path, samples: list[Sample], model: Path, **settings: Any) -> list[dict[str, Any]]:
    """One plain rank, to its end, with its batches in `folder`. Returns its lines of numbers. It is forked from a process that
    has imported DeepSpeed; `steno train` from its first import on is played by the demo that trains and the loop's tests."""
    folder.mkdir(exist_ok=True)
    records = folder / "records.jsonl"
    random.Random(0).shuffle(samples)
    records.write_text("".join(json.dumps(readable(sample)) + "\n" for sample in samples))
    given = {
        "records": str(records), "proxy": "http://127.0.0.1:9", "model": str(model), "precision": "float32", "device": "cpu",
        "learning_rate": 1e-3, "groups_per_step": 2, "micro_batch_tokens": 512, "activation_checkpointing": False,
        "checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": 1, "metrics_file": str(folder / "metrics.jsonl"),
        **settings,
    }  # fmt: skip
    (folder / "train.yaml").write_text(json.dumps(given))
    fork(1, "tests.integration.loop.spy", folder, "train", "--config", str(folder / "train.yaml"))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gained(folder: Path, model: Path, samples: list[Sample], trial: int) -> float:
    """By how much the trained weights find what these trials said likelier, in nats per token."""
    [newest] = sorted((folder / "checkpoints").glob("step-00000002/weights-*"))
    after, before = (AutoModelForCausalLM.from_pretrained(path) for path in (newest, model))
    own = [sample for sample in samples if sample.trial_id.endswith(f".{trial}")]
    return sum(float((_logprobs(after, s) - _logprobs(before, s)).nanmean()) for s in own) / len(own)


OWN = """
def weighted(terms):
    return -terms.advantages_N * terms.ratios_N

def centred(group):
    return [36 * (reward - 0.5) / max(1, length) for reward, length in zip(group.rewards, group.lengths)]
"""


@pytest.mark.parametrize("better", [0, 1], ids=["as scored", "scored the other way, by functions of the user's"])
def test_steps_over_recorded_samples_follow_their_rewards(tmp_path: Path, better: int) -> None:
    model = random_model(tmp_path / "model")
    samples = recorded(model, better)
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / "own.py"
    own = (
        {"objective": f"{file}:weighted", "estimator": f"{file}:centred", "mismatch_level": "sequence"}
        if better
        else {}
    )
    lines = train(tmp_path / "run", list(samples), model, **own)
    assert ("policy/clip_high_fraction" in lines[0]["values"]) is not bool(better), "which only clip measures"
    assert [line["step"] for line in lines] == [1, 2] and all(line["stepped"] for line in lines), "then the records end"
    for step in (1, 2):
        batch = pickle.loads((tmp_path / "run" / f"batch-{step}.pickle").read_bytes())
        signs = {(int(trial.rsplit(".")[-1]) == better) == (value > 0) for trial, value in batch.advantages.items()}
        assert len(batch.advantages) == 4 and signs == {True}
        sizes = [abs(value) for value in batch.advantages.values()]
        assert sizes == pytest.approx([1.5 if better else 0.5**0.5] * 4, rel=1e-5), "12 tokens each"
    ledger = lines[-1]["ledger"]
    assert ledger == {"sampled": 12 * 2 * GROUPS, "trained": 12 * 2 * GROUPS, "untrained": {}}
    assert lines[0]["values"]["reward/mean"] == 0.5 and "staleness/mean" not in lines[0]["values"]
    assert gained(tmp_path / "run", model, samples, better) > 0 > gained(tmp_path / "run", model, samples, 1 - better)
    assert not (tmp_path / "run" / "weights").exists(), "nobody is given weights"


def test_a_run_over_records_goes_on_with_what_its_checkpoint_has_not(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    samples = recorded(model, 0)
    first = train(tmp_path / "run", list(samples), model, total_steps=1)
    both = train(tmp_path / "run", list(samples), model)
    trained = [
        {row.group_id for row in pickle.loads((tmp_path / "run" / f"batch-{step}.pickle").read_bytes()).rows}
        for step in (1, 2)
    ]
    assert len(first) == 1 and len(both) == 2 and both[-1]["ledger"]["sampled"] == 12 * 2 * GROUPS
    assert len(trained[0]) == len(trained[1]) == 2 and not trained[0] & trained[1], "each group once"


def test_records_are_imitated_whatever_they_were_rewarded_with(tmp_path: Path) -> None:
    """A warm start: both trials of a group become likelier, though neither has a reward, and none is another's bad example."""
    model = random_model(tmp_path / "model")
    samples = [sample.model_copy(update={"reward": None}) for sample in recorded(model, 0)]
    lines = train(tmp_path / "run", samples, model, objective="sft")
    assert lines[-1]["ledger"] == {"sampled": 12 * 2 * GROUPS, "trained": 12 * 2 * GROUPS, "untrained": {}}
    values = lines[0]["values"]
    assert values["policy/nll"] == pytest.approx(values["loss"], rel=1e-5) and "policy/entropy" in values
    assert not [name for name in values if name.startswith(("mismatch/", "reward/", "advantage/", "policy/ratio"))]
    assert all(gained(tmp_path / "run", model, samples, trial) > 0 for trial in (0, 1))
