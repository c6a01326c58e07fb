"""Data sets of Harbor's, by their names: from a registry that is a file, with tasks in a repository of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.trials.harbor.plan import harbor_plan
from tests.integration.harbor.conftest import PYTHON

pytestmark = pytest.mark.harbor


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_data_set_is_downloaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Harbor keeps there what it has downloaded
    tasks = []
    for name in ("first", "second"):
        folder = tmp_path / "repository" / name
        folder.mkdir(parents=True)
        (folder / "task.toml").write_text('artifacts = ["/app"]\n')
        (folder / "instruction.md").write_text(f"Do the {name}.")
        tasks.append({"name": name, "git_url": f"file://{tmp_path}/repository", "path": name})
    git(tmp_path / "repository", "init", "-q")
    git(tmp_path / "repository", "add", "-A")
    git(tmp_path / "repository", "commit", "-qm", "tasks")
    commit = git(tmp_path / "repository", "rev-parse", "HEAD")
    listed = [{**task, "git_commit_id": commit} for task in tasks]
    (tmp_path / "registry.json").write_text(
        json.dumps([{"name": "mine", "version": "1.0", "description": "", "tasks": listed}])
    )

    def settings(name: str) -> RolloutSettings:
        return RolloutSettings(
            harbor=name, harbor_registry=tmp_path / "registry.json", harbor_python=Path(PYTHON), agent="codex"
        )

    plan, found, warnings = harbor_plan(settings("mine@1.0"), "mine@1.0", TaskSelection.of(["second"], None, None))
    assert [task.fields["instruction"] for task in found] == ["Do the second."] and warnings == []
    assert plan.python.version == "0.24.0"
    with pytest.raises(ConfigError, match=r"harbor: other@1.0: no such folder, and no data set that Harbor finds: "):
        harbor_plan(settings("other@1.0"), "other@1.0", TaskSelection())
