"""What the training demo is asked for, and what it ends with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from steno.contracts.errors import ConfigError
from steno.contracts.runs.leases import RunView
from steno_cli.demo import record, train
from steno_cli.demo.train_report import show_ledger, write_plot
from steno_cli.main import app
from steno_rollouts.groups.admission import Admission

STEPS = [
    {"step": 1, "stepped": True, "values": {"reward/mean": 0.25}},
    {"step": 1, "stepped": False, "values": {"reward/mean": 0.0}},
    {"step": 2, "stepped": True, "values": {"reward/mean": 0.5}},
]


def test_the_two_ledgers_are_one_and_balance() -> None:
    console = Console(file=io.StringIO(), width=100)
    view = RunView(
        run_id="demo",
        sampled={"base/0": 100, "a/1": 1000},
        not_trained={"evaluation": {"base/0": 100}, "aborted": {"a/1": 50}},
    )
    show_ledger(console, {"sampled": 900, "trained": 600, "untrained": {"zero_variance": 200, "stale": 0}}, view)
    lines = [line.split(None, 1) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    found = {words[1].strip(): int(words[0].replace(",", "")) for words in lines if words and words[0][0].isdigit()}
    assert found == {
        "sampled, over all trials that have ended": 1100,
        "trained": 600,
        "not trained: zero_variance": 200,
        "not trained: evaluation": 100,
        "not trained: aborted": 50,
        "in groups that wait for a further step": 150,
    }


@pytest.mark.parametrize("name", ["curve.png", "curve", "curve.txt"])
def test_the_plot_is_a_picture_with_a_point_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *args, **kwargs: (drawn.append(args[:2]), plot(self, *args, **kwargs))[1]
    )
    write_plot(tmp_path / "new" / name, STEPS, 0.1, 0.6)
    assert drawn == [([1, 2], [0.25, 0.5]), ([0, 2], [0.1, 0.6])]
    with Image.open(tmp_path / "new" / name) as picture:
        assert picture.format == "PNG"
        assert picture.width > 500


def test_settings_of_the_trainer_are_its_own_and_lie_over_the_demos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(train, "run", lambda **given: asked.update(given))
    words = [
        "demo",
        "--train",
        "--set",
        "push=delta",
        "--set",
        "push_full_every=4",
        "--set",
        "wandb_project=2026-11-23",
        "--set",
        "mismatch=off",
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    more = {"push": "delta", "push_full_every": 4, "wandb_project": "2026-11-23", "mismatch": "off"}
    assert asked["more"] == more
    train.check_settings(more)


@pytest.mark.parametrize(
    ("words", "kept"), [(["--keep"], True), (["--no-keep"], False), (["--train", "--keep"], True), (["--train"], False)]
)
def test_it_goes_on_serving_where_it_is_asked_to(words: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --train it ended, and took the trained run with it."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(train, "run", lambda **given: asked.update(given))
    monkeypatch.setattr(record, "run", lambda **given: asked.update(given))
    assert CliRunner().invoke(app, ["demo", *words]).exit_code == 0
    assert asked["keep"] is kept


@pytest.mark.parametrize("word", ["push", "=delta"])
def test_a_setting_without_a_name_or_a_value_is_refused(word: str) -> None:
    refused = CliRunner().invoke(app, ["demo", "--train", "--set", word])
    assert refused.exit_code == 2 and f"got '{word}', must be NAME=VALUE" in " ".join(refused.output.split())


async def test_the_trainer_is_started_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(train, "start", start)
    more = {"push": "delta", "checkpoint_every": 2}
    await train._start_trainer(None, tmp_path, "http://x", 15, 0, more)  # type: ignore[arg-type]
    given = json.loads((tmp_path / "train.yaml").read_text())
    assert (given["push"], given["checkpoint_every"], given["total_steps"], given["run"]) == ("delta", 2, 15, "demo")


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({}, (6, 1)),
        ({"groups_per_step": "13"}, (13, 1)),  # YAML's text
        ({"push_every": 3, "max_staleness_steps": 2}, (6, 2)),
    ],
)
async def test_as_many_groups_are_admitted_as_the_trainer_waits_for(
    more: dict[str, Any], bound: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Admission] = []

    class NoRollouts:
        def __init__(self, *_: object, admission: Admission, **__: object) -> None:
            made.append(admission)

        async def run(self, _: object) -> None:
            pass

    monkeypatch.setattr(train, "Rollouts", NoRollouts)
    ended: Any = SimpleNamespace(process=SimpleNamespace(returncode=0))
    nobody: Any = None
    await train._train(Progress(disable=True), nobody, nobody, tmp_path, "http://x", 15, 0, (ended,), more)
    assert [(admission.groups_per_step, admission.max_staleness_steps) for admission in made] == [bound]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train", "--set", "total_steps=2"], "--set total_steps: got 2; use --steps"),
        (["--train", "--set", "run=x"], "--set run: got 'x'; the demo needs its own"),
        (["--train", "--set", "proxy=http://a"], "--set proxy: got 'http://a'; the demo needs its own"),
        (["--train", "--set", "metrics_file=x"], "--set metrics_file: got 'x'; the demo needs its own"),
        (["--train", "--set", "psuh=delta"], "--set psuh: no such setting; did you mean push?"),
        (["--train", "--set", "push=some"], "--set push: Input should be 'full', 'delta' or 'adapter'"),
        (["--train", "--set", "push_every=9"], "push_every 9: agents would sample by weights 8 steps behind"),
        (["--train", "--set", "push=[a"], "--set push: got '[a', which is not valid YAML: "),
        (["--train", "--set", "push=!!timestamp 2026-13-13"], "--set push: got '!!timestamp 2026-13-13', which is not"),
        (["--train", "--set", "run=x", "--set", "push=!!set {a}"], "--set run: got 'x'"),
        (["--train", "--set", "push=!!set {a}"], "--set push: got {'a'}, must be a value that JSON has"),
        (["--set", "push=delta"], "--set: only with --train"),
        (["--steps", "15"], "--steps: only with --train"),
        (["--seed", "0"], "--seed: only with --train"),
        (["--plot", "a.png"], "--plot: only with --train"),
        (["--train", "--trials", "3"], "--trials: not with --train"),
    ],
)
def test_what_the_trainer_or_the_demo_cannot_take_is_refused_before_anything_is_started(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(train, "demo_train", started)
    monkeypatch.setattr(record, "demo", started)
    monkeypatch.setenv("STENO_TRAIN_PUSH_EVERY", "bad")  # the trainer of the demo does not see it
    refused = CliRunner().invoke(app, ["demo", *words])
    assert isinstance(refused.exception, ConfigError), refused.exception
    assert refused.exception.message.startswith(said) and "\n" not in refused.exception.message


def test_the_demos_own_settings_are_what_the_trainer_takes() -> None:
    train.check_settings({})
    train.check_settings({"push": "delta", "push_full_every": 4, "wandb_project": "2026-11-23", "seed": 3})
