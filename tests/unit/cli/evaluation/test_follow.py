"""Which checkpoint `steno evaluate --follow` takes next, and where its numbers go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from steno.client.client import AsyncSteno
from steno.contracts.errors import ConfigError, Forbidden, StoreUnavailable
from steno.contracts.runs.training_steps import TrainingStep
from steno_cli.commands.evaluate import EvaluateSettings
from steno_cli.evaluation import follow
from steno_cli.evaluation.follow import Checkpoint, StepNumbers, next_checkpoint


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.01)


def written(root: Path, step: int, lineage: str = "a-b", kind: str = "weights") -> Checkpoint:
    model = root / f"step-{step:08d}" / f"{kind}-{lineage}-{step}"
    model.mkdir(parents=True)
    return Checkpoint(model, step, lineage)


async def test_the_newest_is_next_then_older_ones_and_it_ends_with_the_last_step(tmp_path: Path) -> None:
    said: list[str] = []
    done = set[str]()
    waiting = asyncio.ensure_future(next_checkpoint(tmp_path / "later", done, 40, said.append))
    await asyncio.sleep(0.05)
    assert not waiting.done() and said == [f"waiting for the next checkpoint in {tmp_path / 'later'}"]
    older = written(tmp_path / "later", 20)
    assert await waiting == older
    (tmp_path / "later" / ".writing-step-00000060-ab" / "weights-a-b-60").mkdir(parents=True)
    (tmp_path / "later" / "step-00000060" / "zero").mkdir(parents=True)
    newer, adapter = written(tmp_path / "later", 30), written(tmp_path / "later", 40, kind="adapter")
    taken = []
    while (found := await next_checkpoint(tmp_path / "later", done, 40, said.append)) is not None:
        taken.append(found)
        done.add(found.version)
    assert taken == [adapter, newer, older]
    assert [(one.version, one.name, one.is_adapter) for one in taken[:2]] == [
        ("a-b/40", "step-40-a-b", True),
        ("a-b/30", "step-30-a-b", False),
    ]


class Proxy:
    """Takes steps, but for the errors that it is told of."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.posted = list(errors), list[tuple[str, TrainingStep]]()

    async def post_step(self, run: str, step: TrainingStep) -> TrainingStep:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.posted.append((run, step))
        return step


def numbers_of(folder: Path, results: Path | None, proxy: Proxy | None) -> StepNumbers:
    return StepNumbers(folder, results, cast(AsyncSteno, proxy))


async def test_numbers_go_to_the_file_and_the_run_and_a_start_after_a_kill_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    one, two = written(tmp_path, 2), written(tmp_path, 4)
    proxy, said = Proxy(StoreUnavailable("away"), StoreUnavailable("away")), list[str]()
    numbers = numbers_of(tmp_path, tmp_path / "results", proxy)
    await numbers.check(one, said.append)
    await numbers.keep(one, {"eval/reward": 0.5}, said.append)
    assert len(said) == 2 and all("1 steps are not posted" in line for line in said) and not proxy.posted
    await numbers.keep(two, {"eval/reward": 0.75}, said.append)
    posted: list[Any] = [(run, step.step, step.version, step.values) for run, step in proxy.posted]
    assert posted == [
        ("greet", 2, "a-b/2", {"eval/reward": 0.5}),
        ("greet", 4, "a-b/4", {"eval/reward": 0.75}),
    ]
    file = tmp_path / "results" / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[1] == {"step": 4, "version": "a-b/4", "values": {"eval/reward": 0.75}}

    file.write_text(file.read_text()[:-9])  # killed while it wrote
    again = numbers_of(tmp_path, tmp_path / "results", None)
    assert again.done == {"a-b/2"}
    await again.keep(two, {}, said.append)
    assert numbers_of(tmp_path, tmp_path / "results", None).done == {"a-b/2", "a-b/4"}


async def test_what_no_proxy_or_folder_would_take_is_said_before_anything_is_evaluated(tmp_path: Path) -> None:
    one, said = written(tmp_path, 2), list[str]()
    with pytest.raises(ConfigError, match=r"run\.json does not name the run"):
        await numbers_of(tmp_path, None, Proxy()).check(one, said.append)
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    with pytest.raises(Forbidden):
        await numbers_of(tmp_path, None, Proxy(Forbidden("no"))).check(one, said.append)
    await numbers_of(tmp_path, None, None).check(one, said.append)
    assert not said
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="with --follow it is a folder"):
        numbers_of(tmp_path, tmp_path / "file", None)
    (tmp_path / "steps.jsonl").write_text("1\n")
    with pytest.raises(ConfigError, match="not what --follow wrote"):
        numbers_of(tmp_path, tmp_path, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"follow": "c", "model": "m"}, "follow and model: give one"),
        ({"follow": "c", "run": "r"}, "follow and run: give one"),
        ({"until_step": 3}, "until_step needs --follow"),
        ({"follow": "c", "until_step": 0}, "--until-step: Input should be greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EvaluateSettings.load({"tasks": "t", "command": ["a"], **given}, None)
