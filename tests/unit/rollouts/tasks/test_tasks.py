"""Tasks, as users keep them: what is read, what is withheld, what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno.contracts.records import TRIAL_ID
from steno_rollouts.tasks.task import MOST_HIDDEN_BYTES, Task, group_id, kept_on_record, load_tasks
from steno_rollouts.trials import workdir
from steno_rollouts.trials.harbor.tasks import harbor_folders
from tests.unit.rollouts.nobody import as_nobody

TOML = """
schema_version = "1.3"
[metadata]
difficulty = "easy"
written = 2026-01-02
[agent]
timeout_sec = 90
[verifier]
env = { API_KEY = "secret" }
[solution]
env = { HINT = "h" }
"""


def folder(root: Path, name: str, toml: str = TOML) -> Path:
    path = root / name
    for inner in ("environment", "tests", "solution", "data"):
        (path / inner).mkdir(parents=True)
        (path / inner / f"{inner}.txt").write_text(inner)
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text("Do it.\n")
    return path


def lines(root: Path, *rows: str) -> Path:
    path = root / "tasks.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_a_folder_of_task_folders_is_read_in_order_and_what_scores_them_is_withheld(tmp_path: Path) -> None:
    for name in ("b", "a"):
        folder(tmp_path, name)
    (tmp_path / "notes").mkdir()
    first, second = load_tasks(tmp_path)
    assert (first.task_id, second.task_id) == ("a", "b")
    assert first.fields["instruction"] == "Do it.\n" and first.timeout_s == 90
    assert first.fields["metadata"] == {"difficulty": "easy", "written": "2026-01-02"}
    assert set(first.hidden) == {"verifier", "solution"} and not set(first.fields) & {"verifier", "solution"}
    assert first.arguments()["verifier"] == {"env": {"API_KEY": "secret"}}
    assert [task.task_id for task in load_tasks(tmp_path / "a")] == ["a"]


@pytest.mark.parametrize("file", ["data/sales.parquet", "sales.parquet", "state.json"])
def test_a_task_may_have_files_that_data_sets_have(tmp_path: Path, file: str) -> None:
    path = folder(tmp_path, "a")
    (path / file).write_text("{}")
    assert [(task.task_id, task.folder) for task in load_tasks(path)] == [("a", path)]
    (tmp_path / "shared.parquet").touch()
    assert [task.task_id for task in load_tasks(tmp_path)] == ["a"]


@pytest.mark.parametrize("line", ["task_id = 7", 'task_id = "x"', 'instruction = "y"'])
def test_a_folder_says_the_tasks_name_and_its_file_the_instruction(tmp_path: Path, line: str) -> None:
    [task] = load_tasks(folder(tmp_path, "a", f"{line}\n{TOML}"))
    assert (task.task_id, task.fields["task_id"], task.fields["instruction"]) == ("a", "a", "Do it.\n")


def test_a_folder_that_one_may_not_look_into_is_no_task(tmp_path: Path) -> None:
    """`lost+found`, of a volume."""

    def work() -> None:
        folder(Path("tasks"), "a")
        Path("tasks/lost").mkdir(mode=0)
        assert [task.task_id for task in load_tasks(Path("tasks"))] == ["a"]
        assert [path.name for path in harbor_folders(Path("tasks"))] == ["a"]
        Path("tasks").chmod(0o300)
        with pytest.raises(ConfigError, match=r"^tasks: tasks: Permission denied$"):
            load_tasks(Path("tasks"))

    as_nobody(work, tmp_path)


def test_a_working_folder_has_the_environments_content_and_nothing_that_scores_it(tmp_path: Path) -> None:
    task = load_tasks(folder(tmp_path, "a"))[0]
    assert task.folder is not None
    (task.folder / "environment" / "reward.txt").write_text("1")
    (tmp_path / "trial" / "work").mkdir(parents=True)
    (tmp_path / "trial" / "work" / "left.txt").write_text("of an earlier attempt")
    work, task_file = workdir.prepare(tmp_path / "trial", task)
    found = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
    assert found == {"instruction.md", "environment.txt", "data/data.txt"}
    assert "secret" not in task_file.read_text()


def test_lines_are_tasks_named_by_their_id_or_their_number(tmp_path: Path) -> None:
    rows = (
        '{"task_id": "x", "a": 1}',
        '{"id": 7}',
        "",
        '{"instance_id": "django-1", "gold": "g", "_answer": 2}',
        '{"a": 1}',
    )
    tasks = load_tasks(lines(tmp_path, *rows), hide=["gold"])
    assert [task.task_id for task in tasks] == ["x", "7", "django-1", "line-5"]
    assert tasks[2].fields == {"task_id": "django-1", "instance_id": "django-1"}
    assert tasks[2].hidden == {"gold": "g", "_answer": 2}


def test_a_trials_arguments_are_its_own() -> None:
    task = Task("t", {"list": [1]}, {"_deep": {"a": [2]}})
    mine = task.arguments()
    mine["list"].append(3)
    mine["_deep"]["a"].append(3)
    assert task.arguments() == {"list": [1], "_deep": {"a": [2]}}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"id": "a"}', "{"], "line 2: not valid JSON"),
        (["[1]"], "line 1: got a list, must be an object (the fields of a task)"),
        (['{"id": "a"}', '{"id": "a"}'], "two tasks are named 'a' (line 1 and line 2)"),
        (['{"id": "a", "x": NaN}'], "line 1: x: got nan: numbers must be finite"),
        (['{"id": "a"}', '{"id": [1]}'], "line 2: id: got [1], must be text or a whole number"),
        (['{"task_id": true}'], "line 1: task_id: got True, must be text or a whole number"),
        (['{"id": ""}'], "line 1: id: got '', must be text or a whole number"),
        ([""], "has no task"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, rows: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_tasks(lines(tmp_path, *rows))


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[", "not valid TOML"),
        ("[[steps]]\nname = 'one'", "steps: tasks of several steps run with Harbor only (steno rollout --harbor)"),
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec: got 'long', must be a number of seconds"),
    ],
)
def test_bad_task_files_are_named(tmp_path: Path, toml: str, said: str) -> None:
    folder(tmp_path, "a", toml)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_tasks(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (folder(tmp_path, "a") / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"a/instruction\.md: no such file"):
        load_tasks(tmp_path)
    (tmp_path / "a" / "task.toml").write_text("[[steps]]\nname = 'one'\n")  # each step has its own
    with pytest.raises(ConfigError, match="steps: tasks of several steps run with Harbor only"):
        load_tasks(tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_tasks(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no task has a field 'answr'"):
        load_tasks(lines(tmp_path, '{"answer": 1}'), hide=["answr"])


@given(st.text(max_size=200), st.text(max_size=200), st.sampled_from(["epoch-0", "eval-a/20"]))
def test_a_groups_id_is_one_for_trials_too_and_its_own(run: str, task: str, name: str) -> None:
    found = group_id(run, task, name)
    assert re.fullmatch(TRIAL_ID.strip("^$"), f"{found}.4095") and len(found) <= 120
    assert found == group_id(run, task, name) != group_id(run, task + "x", name)


def test_hidden_fields_that_are_large_are_not_kept_with_each_group() -> None:
    """A proxy takes 1 MiB with a group: tasks with large tests can be rolled out."""
    room = MOST_HIDDEN_BYTES - len('{"_tests": ""}')
    assert kept_on_record({"_tests": "x" * room}) == {"_tests": "x" * room}
    assert kept_on_record({"_tests": "x" * (room + 1)}) == {}
    assert kept_on_record({"_tests": "ä" * (room // 2 + 1)}) == {}
    assert kept_on_record({}) == {}
