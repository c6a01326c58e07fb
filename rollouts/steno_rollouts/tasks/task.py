"""Tasks: a folder in Harbor's layout, a folder of such folders, or rows of data (`rows.py`: JSON lines, Parquet, data sets).

    my-task/
      instruction.md     what the agent is asked
      task.toml          its configuration; free fields under [metadata]
      environment/       what the working folder starts with
      tests/, solution/  for whoever scores it: an agent never gets them

What an agent must not see is kept apart from what it may: fields that begin with `_`, those that the user hides, and of
`task.toml` the sections `verifier` and `solution`. Multi-step tasks (`[[steps]]`) are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import storable
from steno_rollouts.tasks.rows import Row, as_json, is_rows, rows, shown
from steno_rollouts.tasks.selection import TaskSelection, lookup

MOST_HIDDEN_BYTES = 256 * 1024
"""Of a task's hidden fields as JSON, to be kept on record."""
INSTRUCTION = "instruction.md"
CONFIGURATION = "task.toml"
ENVIRONMENT = "environment"
TESTS = "tests"
WITHHELD = frozenset({CONFIGURATION, TESTS, "solution", ENVIRONMENT})
"""Of a task folder, what is not copied as it is: what scores the task, and the environment, whose content is."""
_ID_FIELDS = ("task_id", "id", "instance_id")
_HIDDEN_SECTIONS = ("verifier", "solution")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Task:
    """One task. `fields` go to the agent and on record; `hidden` only to the reward function.

    folder: in Harbor's layout; None for a row. timeout_s: the task's own (`[agent] timeout_sec`). place: of a row: `line 3`.
    """

    task_id: str
    fields: Mapping[str, Any]
    hidden: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    timeout_s: float | None = None
    place: str = ""

    @property
    def named(self) -> str:
        """In messages."""
        return f"{self.task_id!r}" + (f" ({self.place})" if self.place else "")

    def field(self, path: str) -> Any:
        """One of all its fields, also one inside another; None: there is none."""
        found = self.task_id if path == "task_id" else lookup(self.fields, path)
        return found if found is not None else lookup(self.hidden, path)

    def arguments(self) -> dict[str, Any]:
        """All fields, hidden ones too: a deep copy, since a trial that changes its own must not change its siblings'."""
        return copy.deepcopy({**self.fields, **self.hidden})


def kept_on_record(hidden: Mapping[str, Any]) -> dict[str, Any]:
    """The hidden fields of a task, for whoever scores its trials anew. None of them where they are large, since each group holds
    a copy."""
    size = len(json.dumps(hidden, ensure_ascii=False).encode())
    return dict(hidden) if size <= MOST_HIDDEN_BYTES else {}


def load_tasks(
    path: Path, *, hide: Collection[str] = (), split: str | None = None, selection: TaskSelection | None = None
) -> list[Task]:
    """The tasks of a folder or a file, in the order of their names or rows.

    Args: split: of a data set that has several. selection: default: all.
    Raises: ConfigError naming the file, the row and the field.
    """
    if not path.exists():
        raise ConfigError(f"tasks: no such file or folder: {path}", field="tasks")
    hidden: set[str] = set()
    tasks = (selection or TaskSelection()).chosen(_read(path, hide, split, hidden))
    if not tasks:
        raise ConfigError(
            f"tasks: {path} has no task (each task is a folder with a {CONFIGURATION}, or a row)", field="tasks"
        )
    seen: dict[str, Task] = {}
    for task in tasks:
        if (other := seen.setdefault(task.task_id, task)) is not task:
            both = f" ({other.place} and {task.place})" if task.place else ""
            raise ConfigError(f"tasks: {path}: two tasks are named {task.task_id!r}{both}", field="tasks")
    check_hidden(hide, hidden)
    return tasks


def check_hidden(hide: Iterable[str], hidden: Collection[str]) -> None:
    """Args: hidden: names of fields that are withheld from some task. Raises: ConfigError: no task has one that is to be."""
    for name in hide:
        if name not in hidden:
            raise ConfigError(f"hide: no task has a field {name!r}", field="hide")


def divided(fields: Mapping[str, Any], hide: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a task that agents may see, and those that are withheld: named in `hide`, or beginning with `_`.

    Raises: ConfigError: the task's name would be withheld.
    """
    hidden = {name: value for name, value in fields.items() if name.startswith("_") or name in hide}
    if "task_id" in hidden:
        raise ConfigError("hide: task_id can't be hidden: it names the group", field="hide")
    return {name: value for name, value in fields.items() if name not in hidden}, hidden


def group_id(run_id: str, task_id: str, round_name: str) -> str:
    """The group of a task in a round of a run: the same three give the same id, which is what makes rollouts resumable."""
    digest = blake2b("\0".join((run_id, task_id, round_name)).encode(), digest_size=5).hexdigest()
    return f"{_slug(run_id, 36)}.{_slug(task_id, 40)}.{_slug(round_name, 16)}.{digest}"


def _slug(text: str, longest: int) -> str:
    return _UNSAFE.sub("-", text)[:longest].strip("-") or "x"


def _read(path: Path, hide: Collection[str], split: str | None, hidden: set[str]) -> Iterator[Task]:
    """Args: hidden: gets the names of fields that are withheld."""
    for task in _folders(path, hide, split) if are_folders(path) else _rows(path, hide, split):
        hidden.update(task.hidden)
        yield task


def are_folders(path: Path) -> bool:
    """Whether it is a task's folder, or a folder of such: each may have Parquet files among its own. Raises: ConfigError."""
    if not path.is_dir():
        return False
    return is_task(path) or any(map(is_task, _inside(path))) or not is_rows(path)


def is_task(path: Path) -> bool:
    return os.path.isfile(path / CONFIGURATION)  # noqa: PTH113  # False, too, for what we may not look at


def _inside(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise ConfigError(f"tasks: {path}: {error.strerror}", field="tasks") from None


def _folders(path: Path, hide: Collection[str], split: str | None) -> Iterator[Task]:
    if split is not None:
        raise ConfigError(
            f"split: got {split!r}, and {path} holds folders of tasks: only data sets have splits", field="split"
        )
    if is_task(path):
        yield _folder(path, hide)
        return
    for inner in filter(is_task, _inside(path)):
        yield _folder(inner, hide)


def _folder(path: Path, hide: Collection[str]) -> Task:
    where = f"tasks: {path / CONFIGURATION}"
    try:
        config = tomllib.loads((path / CONFIGURATION).read_text(encoding="utf-8"))
        if "steps" in config:
            raise ConfigError(
                f"{where}: steps: tasks of several steps run with Harbor only (steno rollout --harbor)", field="tasks"
            )
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"tasks: {error.filename}: no such file", field="tasks") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: not valid TOML, or not readable: {error}", field="tasks") from None
    agent = config.get("agent", {})
    timeout_s = agent.get("timeout_sec") if isinstance(agent, dict) else None
    if timeout_s is not None and (not isinstance(timeout_s, int | float) or not timeout_s > 0):
        raise ConfigError(f"{where}: agent.timeout_sec: got {timeout_s!r}, must be a number of seconds", field="tasks")
    found = {**as_json(config), "task_id": path.resolve().name, "instruction": instruction}
    hidden = {name for name in found if name in _HIDDEN_SECTIONS}
    return _task(found, {*hide, *hidden}, where, folder=path.resolve(), timeout_s=timeout_s)


def _rows(path: Path, hide: Collection[str], split: str | None) -> Iterator[Task]:
    for row in rows(path, split):
        yield _task({**row.fields, "task_id": _name(row)}, hide, row.where, place=row.place)


def _name(row: Row) -> str:
    for key in _ID_FIELDS:
        name = row.fields.get(key)
        if name is None:
            continue
        if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
            raise ConfigError(f"{row.where}: {key}: got {shown(name)}, must be text or a whole number", field="tasks")
        return str(name)
    return row.place.replace(" ", "-")


def _task(
    fields: dict[str, Any],
    hide: Collection[str],
    where: str,
    folder: Path | None = None,
    timeout_s: float | None = None,
    place: str = "",
) -> Task:
    try:
        storable(fields)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", field="tasks") from None
    visible, hidden = divided(fields, hide)
    return Task(fields["task_id"], visible, hidden, folder, timeout_s, place)
