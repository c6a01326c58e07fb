"""Rows of Parquet and of data sets that `datasets` saved, and what of them is refused by its number.

tests/fixtures/datasets-5.2.0 was written by `save_to_disk` of datasets 5.2.0: `splits` is a DatasetDict, `shuffled` a Dataset of
two files whose rows had been shuffled.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steno.contracts.errors import ConfigError
from steno_rollouts.tasks.rows import rows
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.tasks.task import load_tasks

SAVED = Path(__file__).parents[3] / "fixtures" / "datasets-5.2.0"


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_a_row_of_parquet_is_a_task(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "tasks.parquet",
        instance_id=["a", "b", None],
        prompt=[[{"role": "user", "content": "x"}], [], None],
        day=[datetime.date(2026, 1, 2), None, None],
        price=[decimal.Decimal("1.50"), decimal.Decimal("2.00"), None],
        pairs=pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        _gold=["g", "h", "i"],
    )
    first, second, third = load_tasks(path)
    assert first.fields == {
        "instance_id": "a", "task_id": "a", "prompt": [{"role": "user", "content": "x"}], "day": "2026-01-02", "price": 1.5,
        "pairs": {"k": 1},
    }  # fmt: skip
    assert first.hidden == {"_gold": "g"} and second.fields["price"] == 2
    assert (third.task_id, third.named) == ("row-3", "'row-3' (row 3)")


def test_a_folder_of_parquet_is_read_split_by_split(tmp_path: Path) -> None:
    for number, names in enumerate((["a", "b"], ["c"])):
        parquet(tmp_path / "data" / f"train-{number:05}-of-00002.parquet", id=names)
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", id=["d"])
    (tmp_path / "README.md").write_text("a data set")
    assert [task.named for task in load_tasks(tmp_path, split="train")] == ["'a' (row 1)", "'b' (row 2)", "'c' (row 3)"]
    assert [task.task_id for task in load_tasks(tmp_path, split="test")] == ["d"]
    for split, said in ((None, "has test, train: choose one (--split)"), ("val", "got 'val', and ")):
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_tasks(tmp_path, split=split)


def test_what_datasets_saved_is_read_as_it_was_ordered() -> None:
    found = load_tasks(SAVED / "shuffled")
    assert [task.task_id for task in found] == ["repo-2", "repo-5", "repo-4", "repo-1", "repo-3"]
    assert found[1].fields == {
        "instance_id": "repo-5", "task_id": "repo-5", "prompt": "Solve 5 \u2028 now", "answer": 25, "level": 2,
        "metadata": {"difficulty": "hard", "tags": ["a", "t5"]}, "made": "2026-01-06T00:00:00",
    }  # fmt: skip
    selection = TaskSelection.of(["metadata.difficulty=hard"], limit=2)
    hard = load_tasks(SAVED / "splits", split="train", selection=selection)
    assert [task.task_id for task in hard] == ["repo-1", "repo-3"]
    assert len(load_tasks(SAVED / "splits" / "test")) == 2


@pytest.mark.parametrize(
    ("folder", "split", "said"),
    [
        ("splits", None, "split: "),
        ("splits", "dev", "split: got 'dev', and .*splits has train, test"),
        ("shuffled", "train", "split: got 'train', and .* is a data set without splits"),
    ],
)
def test_a_split_that_is_none_is_named(folder: str, split: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tasks(SAVED / folder, split=split)


def test_files_and_folders_of_tasks_have_no_splits(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl is a file: only folders have splits"):
        load_tasks(tmp_path / "tasks.jsonl", split="train")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "task.toml").touch()
    with pytest.raises(ConfigError, match="holds folders of tasks: only data sets have splits"):
        load_tasks(tmp_path, split="train")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1.0, math.inf], "row 2: value: got inf: numbers must be finite"),
        ([b"ok", b"\xff"], "row 1: value: got bytes, must be what JSON has"),
        ([[{"inner": b"x"}], None], "row 1: value: got bytes, must be what JSON has"),
        ([datetime.timedelta(1), None], "row 1: value: got timedelta, must be what JSON has"),
    ],
)
def test_a_value_that_is_not_json_is_named(tmp_path: Path, column: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_tasks(parquet(tmp_path / "tasks.parquet", value=column))


TEXTS = pa.array(["ok", "xx"])
NOT_PYTHON = {
    "timestamp[ms]: ": pa.array([0, 10**17], pa.timestamp("ms")),
    "date32[day]: date value out of range": pa.array([0, 10**7], pa.date32()),
    "string: 'utf-8' codec": pa.Array.from_buffers(
        pa.string(), 2, [None, TEXTS.buffers()[1], pa.py_buffer(b"ok\xff\xfe")]
    ),
    "map<string, int64": pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("said", NOT_PYTHON)
def test_a_value_that_python_can_not_have_is_named(tmp_path: Path, said: str) -> None:
    """pyarrow itself says neither the row nor the field."""
    found, where = {"id": ["a", "b"], "value": NOT_PYTHON[said]}, "row 2: value: got a value that can't be read as "
    one = rows(parquet(tmp_path / "tasks.parquet", **found))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pa.ipc.new_stream(tmp_path / "saved" / "data.arrow", pa.table(found).schema) as stream:
        stream.write_table(pa.table(found))
    for read in (one, rows(tmp_path / "saved")):
        assert next(read).fields["id"] == "a"
        with pytest.raises(ConfigError, match=re.escape(where + said)) as refused:
            next(read)
        assert refused.value.field == "tasks"


@pytest.mark.parametrize("depth", [100, 600, 900])
def test_a_value_that_is_nested_too_deep_is_named(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b", "value": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError, match=r"line 2: (value: got \[{80}….*: nested deeper than 64|not valid JSON)"):
        load_tasks(path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").write_text("PAR1 or so")
    with pytest.raises(ConfigError, match=r"tasks\.parquet: not readable as Parquet"):
        load_tasks(tmp_path / "tasks.parquet")
    shutil.copytree(SAVED / "shuffled", tmp_path / "saved")
    cut = next((tmp_path / "saved").glob("*1-of*.arrow"))
    cut.write_bytes(cut.read_bytes()[:700])
    with pytest.raises(ConfigError, match=r"\.arrow: not readable as Arrow"):
        load_tasks(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}')
    with pytest.raises(ConfigError, match=r"its rows are chosen by indices: save it with flatten_indices\(\)"):
        load_tasks(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("[")
    with pytest.raises(ConfigError, match=r"state\.json: not the note of a data set"):
        load_tasks(tmp_path / "saved")


def test_lines_end_with_a_newline_only_and_one_is_read_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('\ufeff{"id": "a\u2028b"}\r\n{"id": "c"}\nnot JSON'.encode())
    found = rows(path)
    assert [next(found).fields, next(found).fields] == [{"id": "a\u2028b"}, {"id": "c"}]
    with pytest.raises(ConfigError, match="line 3: not valid JSON"):
        next(found)
    path.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(ConfigError, match="line 1: not valid JSON"):
        next(rows(path))
