"""Where numbers go: each tracker is read back with its own reader."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import steno_proxy
from steno.contracts.errors import ConfigError
from steno_rollouts.evaluation import Evaluation
from steno_trainer.data.ledger import Account, Ledger, Reason
from steno_trainer.objective.loss import MAXIMA, MEANS
from steno_trainer.reporting.metrics import MEASURES
from steno_trainer.reporting.trackers import Prometheus, TensorBoard, Trackers, WeightsAndBiases, wandb_id
from steno_trainer.run.folders import look_at_numbers
from steno_trainer.run.main import check_beforehand, train
from steno_trainer.run_config import RunSettings
from steno_trainer.step.step import SCALARS
from tests.support.waiting import until

NAMES = {measure.name for measure in MEASURES}
VALUES = {"reward/mean": 0.25, "loss": -0.5}
LEDGER = Account(5, 3, {Reason.STALE: 2})


def test_every_number_of_a_step_is_described() -> None:
    assert {*MEANS, *MAXIMA, *SCALARS, *Evaluation.of(3, [], []).scalars()} <= NAMES
    assert len(NAMES) == len(MEASURES)
    assert all(re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)?", name) for name in NAMES)


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


def test_prometheus_has_the_names_of_the_users_own_as_labels_of_the_last_step_alone() -> None:
    tracker = Prometheus(0)
    try:
        own = {"trial/tests/passed": 3.0, "reward_by/gsm8k": 0.5, "eval/trial/lint": 1.0}
        tracker.log(1, {**VALUES, **own}, LEDGER)
        tracker.log(2, {**VALUES, "trial/other": 4.0}, LEDGER)
        lines = set(httpx.get(f"http://127.0.0.1:{tracker.port}/metrics", timeout=60).text.splitlines())
    finally:
        tracker.close()
    assert 'steno_train_trial{metric="other"} 4.0' in lines and "steno_train_reward_mean 0.25" in lines
    assert 'steno_train_reward_by{value="gsm8k"} 0.5' in lines and 'steno_train_eval_trial{metric="lint"} 1.0' in lines
    assert not any("tests/passed" in line for line in lines), "no trial of the last step has it"


def test_what_the_page_draws_is_measured() -> None:
    script = Path(steno_proxy.__file__).parent / "viewer" / "static" / "runs.js"
    drawn = re.findall(r'\["([a-z0-9_]+/[a-z0-9_]+)", "', script.read_text())
    assert len(drawn) >= 9 and set(drawn) <= NAMES


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
    books = {("ledger/sampled_tokens", 3, 5.0), ("ledger/trained_tokens", 3, 3.0), ("ledger/stale_tokens", 3, 2.0)}
    assert set(_points(tmp_path)) == {("reward/mean", 3, 0.25), ("loss", 3, -0.5), *books}


def test_tensorboard_draws_one_point_of_a_step_though_batches_come_after_it_that_change_nothing(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.log(12, VALUES, LEDGER)
    tracker.log(12, {"reward/mean": 1.0}, LEDGER, stepped=False)
    tracker.log(12, {"eval/reward": 0.75, "reward/mean": 1.0}, LEDGER, stepped=False)
    tracker.close()
    points = [point for point in _points(tmp_path) if not point[0].startswith("ledger/")]
    assert sorted(points) == [("eval/reward", 12, 0.75), ("loss", 12, -0.5), ("reward/mean", 12, 0.25)]
    assert len(_points(tmp_path)) == 6


@pytest.mark.parametrize(("stepped", "hidden_from"), [(True, 51), (False, 52)])
def test_tensorboard_hides_the_points_of_steps_that_are_taken_again(
    stepped: bool, hidden_from: int, tmp_path: Path
) -> None:
    """As a trainer that was started anew logs them: from step 51, or after it had evaluated the weights of step 51."""
    tracker = TensorBoard(tmp_path)
    tracker.log(51, {"eval/reward": 0.5}, LEDGER, stepped=stepped)
    tracker.log(52, VALUES, LEDGER)
    tracker.close()
    starts = [event.step for event in _events(tmp_path) if event.session_log.status == 1]
    assert starts == [hidden_from], "TensorBoard forgets what older files have from there on"


async def test_wandb_offline_leaves_a_run_to_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WeightsAndBiases("steno", run_id="a-run", mode="offline", folder=tmp_path, config={"learning_rate": 1e-6})
    tracker.log(1, VALUES, LEDGER)
    tracker.close()
    [file] = tmp_path.rglob("*.wandb")
    # Its own process writes it, and may be at it still.
    await until(lambda: b"ledger/stale_tokens" in file.read_bytes())
    assert b"reward/mean" in file.read_bytes()


async def test_wandb_has_a_row_of_its_own_for_each_step_though_steps_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at 57 with a checkpoint at 50, and batches in between that change nothing. What W&B is sent as its own step has to
    grow: it makes one row of what is sent for one step, and drops what is sent for an earlier one."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WeightsAndBiases("steno", run_id="a-run", mode="offline", folder=tmp_path, config={})
    tracker.log(56, {"loss": 0.5, "reward/mean": 0.25}, LEDGER)
    tracker.log(56, {"reward/mean": 1.0}, LEDGER, stepped=False)
    tracker.log(57, {"loss": 0.25}, LEDGER)
    tracker.log(50, {"eval/reward": 0.75, "reward/mean": 1.0}, LEDGER, stepped=False)
    tracker.log(51, {"loss": 0.125}, LEDGER)
    tracker.close()
    [file] = tmp_path.rglob("*.wandb")
    await until(lambda: any(record.HasField("exit") for record in _wandb_records(file.read_bytes())))
    records = _wandb_records(file.read_bytes())
    lines = [record.history.item for record in records if record.HasField("history")]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in line} for line in lines]
    shown = [{name: row[name] for name in row if not name.startswith(("_", "ledger/"))} for row in rows]
    assert shown == [
        {"train/step": 56, "loss": 0.5, "reward/mean": 0.25},
        {"train/step": 57, "loss": 0.25},
        {"train/step": 50, "eval/reward": 0.75},
        {"train/step": 51, "loss": 0.125},
    ]
    assert [row["_step"] for row in rows] == [56, 57, 58, 59], "from the first step on, as another start's rows are"
    [axis] = [record.metric for record in records if record.HasField("metric")]
    assert (axis.glob_name, axis.step_metric) == ("*", "train/step"), "charts are drawn over the trainer's steps"


@pytest.mark.parametrize("run", ["a-run", "greet again", "team/greet #2: 'again'; why? ,x", " \ta run "])
async def test_wandb_takes_any_run_by_an_id_of_its_own_and_shows_its_name(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WeightsAndBiases("steno", run_id=run, mode="offline", folder=tmp_path, config={})
    tracker.close()
    assert tracker._run.id == wandb_id(run) and tracker._run.name == run


def test_runs_that_wandb_takes_by_their_own_names_keep_them_and_no_two_runs_are_one() -> None:
    assert [wandb_id(run) for run in ("a-run", "greet again")] == ["a-run", "greet again"]
    runs = ["a-b", "a/b", "a:b", "a#b", "-a-b", " a-b", "\ta-b"]
    assert len({wandb_id(run) for run in runs}) == len(runs)


def test_wandb_without_a_login_ends_the_start_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for error in (wandb.errors.UsageError("No API key configured."), wandb.errors.AuthenticationError("invalid key")):
        monkeypatch.setattr(wandb, "init", _raising(error))
        with pytest.raises(ConfigError, match=f"wandb_project: {error}") as refused:
            WeightsAndBiases("steno", run_id="r", mode="online", folder=tmp_path, config={})
        assert refused.value.field == "wandb_project"


def test_a_wandb_that_does_not_answer_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "init", _raising(wandb.errors.CommError("Timed out while retrying")))
    tracker = WeightsAndBiases("steno", run_id="r", mode="online", folder=tmp_path, config={})
    tracker.log(1, VALUES, LEDGER)
    tracker.close()
    assert "wandb_project: Weights & Biases gets nothing of this start: Timed out while retrying" in caplog.text


def _raising(error: Exception) -> Callable[..., Any]:
    def init(**options: Any) -> None:
        raise error

    return init


def test_a_tracker_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, step: int, values: object, ledger: object, *, stepped: bool = True) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    class Counting:
        steps = 0

        def log(self, step: int, values: object, ledger: object, *, stepped: bool = True) -> None:
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


def test_an_evaluation_by_verifiers_is_refused_as_its_tasks_own_code_would_run_in_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text("verifiers: words\n")
    settings = RunSettings.load({"model": "m", "eval_every": 1, "eval_config": str(tmp_path / "eval.yaml")}, None)
    with pytest.raises(ConfigError, match="use `steno evaluate --verifiers` instead") as refused:
        train(settings)
    assert refused.value.field == "eval_config"


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


@pytest.mark.parametrize(
    "given",
    [
        {"metrics_file": "file/metrics.jsonl"},
        {"metrics_file": "folder"},
        {"tensorboard_dir": "file/logs"},
        {"wandb_project": "p", "wandb_dir": "file/wandb"},
    ],
)
def test_a_place_for_numbers_that_can_not_be_written_is_named_before_the_model_is_looked_for(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    settings = RunSettings.load({"model": "no-such-model", "device": "cpu", **given}, None)
    *_, field = given
    with pytest.raises(ConfigError, match=rf"^{field}: {given[field]} can't be written: ") as refused:
        check_beforehand(settings)
    assert refused.value.field == field


def test_places_for_numbers_are_made_where_they_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    look_at_numbers(RunSettings(model="m", metrics_file=Path("new/metrics.jsonl"), tensorboard_dir=Path("logs")))
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "metrics.jsonl", "logs"}
    Path("new/metrics.jsonl").write_text("kept\n")
    look_at_numbers(RunSettings(model="m", metrics_file=Path("new/metrics.jsonl")))
    assert Path("new/metrics.jsonl").read_text() == "kept\n"


def _points(folder: Path) -> list[tuple[str, int, float]]:
    return [(value.tag, event.step, value.simple_value) for event in _events(folder) for value in event.summary.value]


def _events(folder: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    return [Event.FromString(raw) for file in folder.glob("events.*") for raw in _records(file.read_bytes())]


def _records(data: bytes) -> list[bytes]:
    """TFRecord: length (8), its checksum (4), data, its checksum (4)."""
    records = []
    while data:
        length = int.from_bytes(data[:8], "little")
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


def _wandb_records(data: bytes) -> list[Any]:
    """LevelDB's log after a head of 7 bytes: blocks of 32 KiB; of each piece its checksum (4), length (2), kind (1: whole, 4: the
    last one), and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, place, whole = [], 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        end = place + 7 + int.from_bytes(data[place + 4 : place + 6], "little")
        if end > len(data):
            break  # it is being written
        whole += data[place + 7 : end]
        if data[place + 6] in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
        place = end
    return records
