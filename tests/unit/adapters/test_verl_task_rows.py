"""Where `steno tasks parquet` writes: never in place of what is no file, and through links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyarrow import parquet

from steno.contracts.errors import ConfigError
from steno_adapters.verl.task_rows import write_parquet
from steno_rollouts.tasks.task import Task

TASKS = [Task("t", {"task_id": "t", "question": "6 * 7?"})]


def written(file: Path) -> int:
    return write_parquet(TASKS, file, agent_name="steno", data_source="steno")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_file_stays_and_the_file_is_replaced(there: bool, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    if there:
        (kept / "train.parquet").write_text("old")
    (tmp_path / "link").symlink_to("kept/train.parquet")
    assert written(tmp_path / "link") == 1
    assert (tmp_path / "link").is_symlink()
    assert parquet.read_table(kept / "train.parquet").num_rows == 1
    assert [path.name for path in kept.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize("name", ["fifo", "link"])
def test_what_is_no_file_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    """As root, a device would be gone for all programs of the machine. Here a FIFO stands for it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with pytest.raises(ConfigError, match=f"output: got .*{name}, which is no file, must be a file or a new name") as e:
        written(tmp_path / name)
    assert e.value.field == "output"
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_place_that_is_not_there_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output: .*nowhere/t.parquet: No such file or directory"):
        written(tmp_path / "nowhere" / "t.parquet")
    assert list(tmp_path.iterdir()) == []
