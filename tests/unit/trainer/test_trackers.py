"""Where numbers go: each tracker is read back with its own reader."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.errors import ConfigError
from steno_rollouts.evaluation import Evaluation
from steno_trainer.data.ledger import Account, Ledger, Reason
from steno_trainer.objective.loss import MAXIMA, MEANS
from steno_trainer.reporting.metrics import BY_NAME, MEASURES
from steno_trainer.reporting.trackers import Prometheus, TensorBoard, Trackers, WeightsAndBiases
from steno_trainer.run.main import train
from steno_trainer.run_config import RunSettings
from steno_trainer.step.step import SCALARS
from tests.support.waiting import until

VALUES = {"reward/mean": 0.25, "loss": -0.5}
LEDGER = Account(5, 3, {Reason.STALE: 2})


def test_every_number_of_a_step_is_described() -> None:
    assert {*MEANS, *MAXIMA, *SCALARS} <= BY_NAME.keys()
    assert Evaluation.of(3, [], []).scalars().keys() <= BY_NAME.keys()
    assert len(BY_NAME) == len(MEASURES)
    assert all(re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)?", name) for name in BY_NAME)


def test_prometheus_serves_the_last_step_and_the_ledger() -> None:
    tracker = Prometheus(0)
    try:
        ledger = Ledger()
        ledger.sampled("a/1", 30)
        ledger.trained("a/1", 20)
        ledger.untrained("a/1", Reason.STALE, 10)
        tracker.log(7, VALUES, ledger.total())
        text = httpx.get(f"http://127.0.0.1:{tracker.port}/metrics", timeout=60).text
    finally:
        tracker.close()
    lines = set(text.splitlines())
    assert "steno_train_reward_mean 0.25" in lines
    assert "steno_train_step 7.0" in lines
    assert 'steno_train_ledger_tokens{outcome="sampled"} 30.0' in lines
    assert 'steno_train_ledger_tokens{outcome="stale"} 10.0' in lines


def test_a_taken_port_is_a_configuration_error() -> None:
    first = Prometheus(0)
    try:
        with pytest.raises(ConfigError, match="metrics_port") as refused:
            Prometheus(first.port)
    finally:
        first.close()
    assert refused.value.field == "metrics_port"


def test_tensorboard_files_hold_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.log(3, VALUES, LEDGER)
    tracker.close()
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in tmp_path.glob("events.*"):
        for raw in _records(file.read_bytes()):
            event = Event.FromString(raw)
            found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    books = {"ledger/sampled_tokens": (3, 5.0), "ledger/trained_tokens": (3, 3.0), "ledger/stale_tokens": (3, 2.0)}
    assert found == {"reward/mean": (3, 0.25), "loss": (3, -0.5), **books}


async def test_wandb_offline_leaves_a_run_to_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WeightsAndBiases("steno", run_id="a-run", mode="offline", folder=tmp_path, config={"learning_rate": 1e-6})
    tracker.log(1, VALUES, LEDGER)
    tracker.close()
    [file] = tmp_path.rglob("*.wandb")
    # Its own process writes it, and may be at it still.
    await until(lambda: b"ledger/stale_tokens" in file.read_bytes())
    assert b"reward/mean" in file.read_bytes()


def test_a_tracker_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, step: int, values: object, ledger: object) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    class Counting:
        steps = 0

        def log(self, step: int, values: object, ledger: object) -> None:
            self.steps += 1

        def close(self) -> None:
            self.steps += 100

    counting = Counting()
    trackers = Trackers([Broken(), counting])
    trackers.log(1, VALUES, LEDGER)
    trackers.close()
    assert counting.steps == 101
    assert caplog.text.count("Broken failed") == 2


def test_what_is_not_installed_is_named_with_its_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"tensorboardX is not installed") as refused:
        TensorBoard(tmp_path)
    assert refused.value.field == "tensorboard_dir"


@pytest.mark.parametrize(
    ("given", "field"),
    [({"tensorboard_dir": "logs"}, "tensorboard_dir"), ({"eval_every": 1, "eval_config": "eval.yaml"}, "tasks")],
)
def test_what_is_missing_is_told_before_the_model_is_looked_for(
    given: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    (tmp_path / "eval.yaml").write_text("tasks: no-such-folder\ncommand: [agent]\n")
    settings = RunSettings.load({"model": "no-such-model", "device": "cpu", **given}, None)
    with pytest.raises(ConfigError) as refused:
        train(settings)
    assert refused.value.field == field


def _records(data: bytes) -> list[bytes]:
    """TFRecord: length (8), its checksum (4), data, its checksum (4)."""
    records = []
    while data:
        length = int.from_bytes(data[:8], "little")
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records
