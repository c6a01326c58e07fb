"""What of a tasks' folder trials do not see, and that it takes a few mounts however many tasks there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno_rollouts.trials.confine import CannotConfine, Confinement
from steno_rollouts.trials.scoring import MOST_KEPT, TaskSource, reward_file, task_source


def tasks(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"t{number}").mkdir(parents=True)
        (folder / f"t{number}" / "task.toml").touch()


def test_of_a_folder_of_tasks_all_else_stays_also_what_links_lead_to(tmp_path: Path) -> None:
    tasks(tmp_path, 3)
    (tmp_path / "agent.sh").touch()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".git").mkdir()
    for command in (["sh", "-c", f"python3 {tmp_path}/agent.py"], [f"{tmp_path}/venv/bin/python", "-m", "agent"]):
        found = task_source(tmp_path, command)
        names = ("agent.sh", "broken", "lib", "venv")
        assert found == TaskSource(tmp_path, tuple(tmp_path / name for name in names))
    assert task_source(tmp_path, ["agent"]) == TaskSource(tmp_path), "nothing of it is needed"


@pytest.mark.parametrize("needed", ["cwd", "path"])
def test_a_folder_in_which_the_launcher_stands_or_looks_for_programs_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: str
) -> None:
    tasks(tmp_path, 1)
    (tmp_path / "lib").mkdir()
    if needed == "cwd":
        monkeypatch.chdir(tmp_path / "lib")
    else:
        monkeypatch.setenv("PATH", f"/bin:{tmp_path}/lib")
    assert task_source(tmp_path, ["agent"]) == TaskSource(tmp_path, (tmp_path / "lib",))


def test_tasks_that_are_links_are_hidden_where_they_are(tmp_path: Path) -> None:
    tasks(tmp_path / "all", 2)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "t1").symlink_to("../all/t1")
    assert task_source(tmp_path / "some", []) == TaskSource(tmp_path / "some", (), (tmp_path / "all" / "t1",))


def test_of_a_task_that_is_given_alone_what_scores_it_goes(tmp_path: Path) -> None:
    tasks(tmp_path, 1)
    for name in ("tests", "solution", "environment"):
        (tmp_path / "t0" / name).mkdir()
    found = task_source(tmp_path / "t0", [f"{tmp_path}/t0/environment/agent"])
    assert found == TaskSource(tmp_path / "t0", (tmp_path / "t0" / "environment",))


def test_of_a_data_set_its_files_go(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00001.parquet").touch()
    (tmp_path / "agent.py").touch()
    (tmp_path / ".git").mkdir()
    found = task_source(tmp_path, ["python", f"{tmp_path}/agent.py"])
    assert found == TaskSource(tmp_path, (tmp_path / "agent.py",))


def test_a_file_goes_unless_the_command_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tasks.jsonl"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert task_source(Path("tasks.jsonl"), ["agent"]) == TaskSource(file)
    assert task_source(file, ["agent", f"--data={file}"]) is None
    assert task_source(Path("tasks.jsonl"), ["agent", "--out", "my-tasks.jsonl.gz"]) == TaskSource(file)
    assert task_source(Path("other.jsonl"), ["agent"]) is None and task_source(None, []) is None
    assert reward_file("score.py:score", ["./agent.sh"]) == [tmp_path / "score.py"]
    assert reward_file("score.py:score", ["python", "/opt/my_score.py"]) == [tmp_path / "score.py"]
    assert reward_file("agent.py:score", ["python", "./agent.py"]) == [] and reward_file(None, []) == []


def test_many_tasks_cost_a_trial_no_mounts_and_too_much_beside_them_is_said(tmp_path: Path) -> None:
    tasks(tmp_path / "tasks", 1000)
    found = task_source(tmp_path / "tasks", [])
    assert found == TaskSource(tmp_path / "tasks")
    for number in range(MOST_KEPT + 1):
        (tmp_path / "tasks" / f"file{number}").touch()
    needed = task_source(tmp_path / "tasks", [f"{tmp_path}/tasks/file0"])
    with pytest.raises(
        CannotConfine, match=f"holds {MOST_KEPT + 1} entries beside its tasks and 0 links to tasks, more"
    ):
        Confinement.of([], tmp_path / "work", needed)
