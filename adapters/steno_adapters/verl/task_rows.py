"""Tasks as rows of verl's data set, which it batches and shows; the agent host reads the tasks themselves. Imports no verl."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno_rollouts.tasks.task import Task

SHOWN = ("instruction", "prompt", "question", "problem_statement")
"""Fields that may hold a task's prompt: the first text that is not empty is taken."""


def task_row(task: Task, index: int, *, agent_name: str, data_source: str) -> dict[str, Any]:
    """As verl's `RLHFDataset` reads it. Nothing that is hidden from agents is in it, and `extra_info.task_id` names the task.

    Raises: ConfigError: it has no prompt.
    """
    prompt = next((text for name in SHOWN if isinstance(text := task.fields.get(name), str) and text), None)
    if prompt is None:
        raise ConfigError(
            f"tasks: task {task.named} has no text to show: it has {', '.join(sorted(task.fields))}, must have one of "
            f"{', '.join(SHOWN)}",
            field="tasks",
        )
    return {
        "data_source": data_source,
        "agent_name": agent_name,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "agent",
        "reward_model": {"style": "steno", "ground_truth": ""},
        "extra_info": {"index": index, "task_id": task.task_id},
    }


def write_parquet(tasks: Iterable[Task], file: Path, *, agent_name: str, data_source: str) -> int:
    """Needs pyarrow. Written beside the file, then moved into its place; of a link, its target is replaced.

    Returns: rows. Raises: ConfigError: a task without a prompt; a file that can't be written; a folder, a device or a FIFO.
    """
    import pyarrow
    from pyarrow import parquet

    rows = [task_row(task, i, agent_name=agent_name, data_source=data_source) for i, task in enumerate(tasks)]
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):  # root could put the file in place of a device
            raise ConfigError(f"output: got {file}, which is no file, must be a file or a new name", field="output")
        to = Path(os.path.realpath(file))
        new = to.with_name(f".{to.name}.new")
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows), new)
            new.replace(to)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"output: {file}: {why}", field="output") from None
    return len(rows)
