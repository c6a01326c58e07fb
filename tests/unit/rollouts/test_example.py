"""The example that a user would start from: its settings load, its lines exist, its tasks are scored as it says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from steno.cli import app
from trainer_bridge.rollouts import workdir
from trainer_bridge.rollouts.build import Prepared
from trainer_bridge.rollouts.config import RolloutSettings
from trainer_bridge.rollouts.tasks import Task, load_tasks
from trainer_bridge.run_config import RunSettings

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy/examples/qwen2.5-3b-mini-swe-agent"
SOLUTIONS = {
    "mean-of-nothing": {"stats.py": "def mean(values):\n    return sum(values) / len(values) if values else 0.0\n"},
    "last-page": {
        "pages.py": "def pages(items, size):\n    if size < 1:\n        raise ValueError(size)\n"
        "    return [items[i:i + size] for i in range(0, len(items), size)]\n"
    },
    "slug": {"slug.py": "import re\ndef slug(title):\n    return '-'.join(re.findall('[a-z0-9]+', title.lower()))\n"},
    "word-count": {
        "count.py": "import sys\nif len(sys.argv) < 2:\n    sys.exit(print('usage: count.py FILE') or 2)\n"
        "print(len(open(sys.argv[1]).read().split()))\n"
    },
}


@pytest.fixture(autouse=True)
def started_in_the_examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)


def score(task: Task, work: Path) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("example_score", EXAMPLE / "score.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert task.folder is not None
    found: dict[str, float] = module.score(task.folder, work)
    return found


def test_its_settings_belong_together() -> None:
    rollout = RolloutSettings.load({}, EXAMPLE / "rollout.yaml")
    train = RunSettings.load({}, EXAMPLE / "train.yaml")
    train.check()
    assert (rollout.run, rollout.groups_per_step) == (train.run, train.groups_per_step)
    assert rollout.max_staleness_steps == train.max_staleness_steps
    prepared = Prepared.of(rollout, "run")
    assert {task.task_id for task in prepared.tasks} == set(SOLUTIONS) and prepared.reward is not None
    evaluation = RolloutSettings.load({}, train.eval_config)
    assert evaluation.purpose == "eval" and Prepared.of(evaluation, "run").tasks


@pytest.mark.parametrize("task", load_tasks(EXAMPLE / "tasks"), ids=lambda task: task.task_id)
def test_a_task_is_unsolved_as_it_comes_and_solved_by_its_solution(task: Task, tmp_path: Path) -> None:
    work, _ = workdir.prepare(tmp_path / "trial", task)
    assert not (work / "tests").exists() and not (work / "checks.py").exists()
    assert score(task, work)["reward"] < 1.0
    for name, text in SOLUTIONS[task.task_id].items():
        (work / name).write_text(text)
    assert score(task, work) == {"reward": 1.0, "solved": 1.0}


@pytest.mark.parametrize("script", sorted(EXAMPLE.glob("*.sh")), ids=lambda path: path.name)
def test_its_scripts_are_shell_and_name_options_that_there_are(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", str(script)], check=True)
    for line in script.read_text().replace("\\\n", " ").splitlines():
        found = re.search(r"\bsteno ((?:proxy|worker|train|rollout) .*)", line)
        if found and not line.startswith("#"):
            name, *words = shlex.split(found[1])
            command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
            known = {option for parameter in command.params for option in parameter.opts}
            given = {word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")}
            assert given and given <= known, f"{given - known} of {name}"


def test_the_agents_line_points_at_the_trial(tmp_path: Path) -> None:
    """Run with a `mini` that only says what it was given."""
    mini = tmp_path / "bin" / "mini"
    mini.parent.mkdir()
    mini.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; echo "home $HOME"\n')
    mini.chmod(0o755)
    environment = {
        "PATH": f"{mini.parent}:{Path(shutil.which('sh') or '/bin/sh').parent}",
        "OPENAI_BASE_URL": "http://p/t/v1", "STENO_TASK_INSTRUCTION": "Do 'it' now.", "STENO_WORKDIR": str(tmp_path / "t/work"),
    }  # fmt: skip
    (tmp_path / "t").mkdir()
    done = subprocess.run([EXAMPLE / "agent.sh"], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert "model.model_kwargs.api_base=http://p/t/v1" in words and "Do 'it' now." in words
    assert words[-1] == f"home {tmp_path / 't/home'}"
