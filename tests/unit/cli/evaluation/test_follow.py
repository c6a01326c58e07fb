"""Which checkpoint `steno evaluate --follow` takes next, and where its numbers go."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError, Forbidden, StoreUnavailable
from steno.contracts.runs.training_steps import TrainingStep, TrainingStepPage
from steno_cli.commands import evaluate
from steno_cli.commands.evaluate import EvaluateSettings
from steno_cli.demo.processes import DemoFailed
from steno_cli.evaluation import follow
from steno_cli.evaluation.follow import Checkpoint, StepNumbers, next_checkpoint
from steno_cli.evaluation.serving import Died


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.01)


def written(root: Path, step: int, at: float, *, lineage: str = "a-b", kind: str = "weights") -> Checkpoint:
    model = root / f"step-{step:08d}" / f"{kind}-{lineage}-{step}"
    model.mkdir(parents=True)
    state = model.parent / "state.msgpack"
    state.touch()
    os.utime(state, (at, at))
    return Checkpoint(model, step, lineage, at)


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def test_the_newest_is_next_then_older_ones_and_it_ends_with_the_last_step(tmp_path: Path) -> None:
    said: list[str] = []
    done = set[str]()
    waiting = asyncio.ensure_future(next_checkpoint(tmp_path / "later", done, 40, said.append))
    await until(lambda: said)
    assert not waiting.done() and said == [f"waiting for the next checkpoint in {tmp_path / 'later'}"]
    older = written(tmp_path / "later", 20, 1.0)
    assert await waiting == older
    (tmp_path / "later" / ".writing-step-00000060-ab" / "weights-a-b-60").mkdir(parents=True)
    (tmp_path / "later" / "step-00000060" / "weights-a-b-60").mkdir(parents=True)  # not whole
    newer = written(tmp_path / "later", 30, 2.0)
    adapter = written(tmp_path / "later", 40, 4.0, kind="adapter")
    given_up = written(tmp_path / "later", 50, 3.0, lineage="c")  # whose run has gone back to step 20
    taken = []
    while (found := await next_checkpoint(tmp_path / "later", done, 40, said.append)) is not None:
        taken.append(found)
        done.add(found.version)
    assert taken == [adapter, given_up, newer, older]
    assert [(one.version, one.name, one.is_adapter) for one in taken[:2]] == [
        ("a-b/40", "step-40-a-b", True),
        ("c/50", "step-50-c", False),
    ]


async def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, removed = written(tmp_path, 20, 1.0), written(tmp_path, 10, 2.0)
    looks = Path.iterdir

    def late(folder: Path) -> Iterator[Path]:
        if folder == removed.model.parent:
            shutil.rmtree(folder)
        return looks(folder)

    monkeypatch.setattr(Path, "iterdir", late)
    assert await next_checkpoint(tmp_path, set(), None, lambda said: None) == kept


class Proxy:
    """Has the steps that it is told of; each post meets the next of the errors."""

    def __init__(self, *errors: Exception | None, steps: tuple[TrainingStep, ...] = ()) -> None:
        self.errors, self.steps = list(errors), {step.step: step for step in steps}

    async def step_page(self, run: str, *, start: int = 0, limit: int) -> TrainingStepPage:
        assert run == "greet"
        return TrainingStepPage(items=[self.steps[step] for step in sorted(self.steps) if step >= start][:limit])

    async def post_step(self, run: str, step: TrainingStep) -> TrainingStep:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        step = step if step.at is not None else step.model_copy(update={"at": 99.0})
        self.steps[step.step] = step.over(self.steps.get(step.step))
        return step


def numbers_of(folder: Path, results: Path | None, proxy: Proxy | None, said: list[str]) -> StepNumbers:
    return StepNumbers(folder, results, cast(AsyncClient, proxy), said.append)


async def test_numbers_join_those_of_the_trainer_and_what_could_not_be_posted_is_by_a_later_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    one, two, three = (written(tmp_path, step, step) for step in (2, 4, 6))
    trained = [TrainingStep(step=step, version=f"a-b/{step}", at=50.0 + step, values={"loss": 1.0}) for step in (2, 4)]
    proxy, said = Proxy(None, StoreUnavailable("away"), StoreUnavailable("away"), steps=(*trained,)), list[str]()
    numbers = numbers_of(tmp_path, tmp_path / "results", proxy, said)
    await numbers.check(one)
    assert list(proxy.steps.values()) == trained
    await numbers.keep(one, {"eval/reward": 0.5})
    await numbers.keep(two, {"eval/reward": 0.75})
    assert ["these steps now: 2: away" in said[0], "these steps now: 2, 4: away" in said[1]] == [True, True]
    assert list(proxy.steps.values()) == trained
    file = tmp_path / "results" / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[1] == {"step": 4, "version": "a-b/4", "at": 4.0, "values": {"eval/reward": 0.75}}

    again = numbers_of(tmp_path, tmp_path / "results", proxy, said)
    assert again.done == {"a-b/2", "a-b/4"}
    await again.check(three)
    await again.keep(three, {"eval/reward": 1.0})
    assert await again.finish() and len(said) == 2
    assert [(step.at, step.values) for step in proxy.steps.values()] == [
        (52.0, {"loss": 1.0, "eval/reward": 0.5}),
        (54.0, {"loss": 1.0, "eval/reward": 0.75}),
        (6.0, {"eval/reward": 1.0}),
    ]


async def test_numbers_that_are_still_not_posted_at_the_end_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    said: list[str] = []
    numbers = numbers_of(tmp_path, None, Proxy(*2 * [StoreUnavailable("away")]), said)
    await numbers.keep(written(tmp_path, 2, 1.0), {})
    assert not await numbers.finish() and len(said) == 2
    assert await numbers.finish()


async def test_a_step_that_a_later_start_of_the_run_has_taken_anew_keeps_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    theirs = TrainingStep(step=2, version="c/2", at=5.0, values={"eval/reward": 1.0})
    proxy, said = Proxy(steps=(theirs,)), list[str]()
    numbers = numbers_of(tmp_path, None, proxy, said)
    await numbers.keep(written(tmp_path, 2, 4.0), {"eval/reward": 0.0})
    assert proxy.steps == {2: theirs} and "step 2 was trained again as c/2" in said[0]
    assert await numbers.finish()
    await numbers.keep(
        written(tmp_path, 2, 6.0, lineage="d"), {"eval/reward": 0.5}
    )  # which the trainer posts later itself
    assert (proxy.steps[2].version, proxy.steps[2].values, len(said)) == ("d/2", {"eval/reward": 0.5}, 1)


async def test_a_line_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    numbers = numbers_of(tmp_path, tmp_path, None, said)
    await numbers.keep(written(tmp_path, 2, 1.0), {})
    file = tmp_path / "steps.jsonl"
    file.write_text(file.read_text() + '{"step": 4, "ver')
    again = numbers_of(tmp_path, tmp_path, None, said)
    assert again.done == {"a-b/2"}
    await again.keep(written(tmp_path, 4, 2.0), {})
    assert numbers_of(tmp_path, tmp_path, None, said).done == {"a-b/2", "a-b/4"} and not said


async def test_what_no_proxy_or_folder_would_take_is_said_before_anything_is_evaluated(tmp_path: Path) -> None:
    said: list[str] = []
    one = written(tmp_path, 2, 1.0)
    with pytest.raises(ConfigError, match=r"run\.json does not name the run"):
        await numbers_of(tmp_path, None, Proxy(), said).check(one)
    (tmp_path / "run.json").write_text(json.dumps({"run": "greet"}))
    with pytest.raises(Forbidden):
        await numbers_of(tmp_path, None, Proxy(Forbidden("no"), steps=(TrainingStep(step=1),)), said).check(one)
    with pytest.raises(Forbidden):
        await numbers_of(tmp_path, None, Proxy(Forbidden("no")), said).check(one)
    await numbers_of(tmp_path, None, None, said).check(one)
    assert not said
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="with --follow it is a folder"):
        numbers_of(tmp_path, tmp_path / "file", None, said)
    (tmp_path / "steps.jsonl").write_text("1\n")
    with pytest.raises(ConfigError, match="not what --follow wrote"):
        numbers_of(tmp_path, tmp_path, None, said)


async def test_a_checkpoint_is_left_out_only_if_it_was_removed_before_it_was_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that dies under each evaluation is an error, also where its checkpoint was removed meanwhile."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n")
    settings = EvaluateSettings.load({"tasks": str(tasks), "command": ["a"], "follow": str(tmp_path)}, None)
    errors = [DemoFailed("the merge ended with code 1"), Died("the worker ended with code 1")]
    seen: list[str] = []

    async def removed(_: EvaluateSettings, checkpoint: Checkpoint, port: int) -> list[Any]:
        seen.append(checkpoint.version)
        shutil.rmtree(checkpoint.model.parent)
        raise errors.pop(0)

    monkeypatch.setattr(evaluate, "_of_checkpoint", removed)
    written(tmp_path, 2, 2.0), written(tmp_path, 4, 1.0)
    with pytest.raises(Died, match="the worker ended"):
        await evaluate._follow(settings, tmp_path)
    assert seen == ["a-b/2", "a-b/4"] and "step 2 is left out" in capsys.readouterr().err


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
