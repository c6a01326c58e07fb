"""Tasks: a folder in Harbor's layout, a folder of such folders, or JSON lines.

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
import datetime
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import storable

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

    folder: in Harbor's layout; None for a line of JSON. timeout_s: the task's own (`[agent] timeout_sec`).
    """

    task_id: str
    fields: Mapping[str, Any]
    hidden: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    timeout_s: float | None = None

    def arguments(self) -> dict[str, Any]:
        """All fields, hidden ones too: a deep copy, since a trial that changes its own must not change its siblings'."""
        return copy.deepcopy({**self.fields, **self.hidden})


def load_tasks(path: Path, *, hide: Collection[str] = ()) -> list[Task]:
    """The tasks of a folder or a `.jsonl` file, in the order of their names or lines.

    Raises: ConfigError naming the file, the line and the field.
    """
    if path.is_dir():
        tasks = _folders(path, hide)
    elif path.is_file():
        tasks = _lines(path, hide)
    else:
        raise ConfigError(f"tasks: no such file or folder: {path}", field="tasks")
    if not tasks:
        raise ConfigError(f"tasks: {path} has no task (each task is a folder with a {CONFIGURATION})", field="tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise ConfigError(f"tasks: {path}: two tasks are named {task.task_id!r}", field="tasks")
        seen.add(task.task_id)
    for name in hide:
        if not any(name in task.hidden for task in tasks):
            raise ConfigError(f"hide: no task has a field {name!r}", field="hide")
    return tasks


def group_id(run_id: str, task_id: str, round_name: str) -> str:
    """The group of a task in a round of a run: the same three give the same id, which is what makes rollouts resumable."""
    digest = blake2b("\0".join((run_id, task_id, round_name)).encode(), digest_size=5).hexdigest()
    return f"{_slug(run_id, 36)}.{_slug(task_id, 40)}.{_slug(round_name, 16)}.{digest}"


def _slug(text: str, longest: int) -> str:
    return _UNSAFE.sub("-", text)[:longest].strip("-") or "x"


def _folders(path: Path, hide: Collection[str]) -> list[Task]:
    if (path / CONFIGURATION).is_file():
        return [_folder(path, hide)]
    return [_folder(inner, hide) for inner in sorted(path.iterdir()) if (inner / CONFIGURATION).is_file()]


def _folder(path: Path, hide: Collection[str]) -> Task:
    where = f"tasks: {path / CONFIGURATION}"
    try:
        config = tomllib.loads((path / CONFIGURATION).read_text(encoding="utf-8"))
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"tasks: {error.filename}: no such file", field="tasks") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: not valid TOML, or not readable: {error}", field="tasks") from None
    if "steps" in config:
        raise ConfigError(f"{where}: steps: tasks of several steps are not supported", field="tasks")
    agent = config.get("agent", {})
    timeout_s = agent.get("timeout_sec") if isinstance(agent, dict) else None
    if timeout_s is not None and (not isinstance(timeout_s, int | float) or not timeout_s > 0):
        raise ConfigError(f"{where}: agent.timeout_sec: got {timeout_s!r}, must be a number of seconds", field="tasks")
    found = {"task_id": path.resolve().name, "instruction": instruction, **_plain(config)}
    hidden = {name for name in found if name in _HIDDEN_SECTIONS}
    return _task(found, {*hide, *hidden}, where, folder=path.resolve(), timeout_s=timeout_s)


def _lines(path: Path, hide: Collection[str]) -> list[Task]:
    tasks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"tasks: {path}: not readable: {error}", field="tasks") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"tasks: {path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}", field="tasks") from None
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{where}: got a {type(fields).__name__}, must be an object (the fields of a task)", field="tasks"
            )
        name = next((fields[key] for key in _ID_FIELDS if isinstance(fields.get(key), str | int)), f"line-{number}")
        tasks.append(_task({**fields, "task_id": str(name)}, hide, where))
    return tasks


def _task(
    fields: dict[str, Any],
    hide: Collection[str],
    where: str,
    folder: Path | None = None,
    timeout_s: float | None = None,
) -> Task:
    try:
        storable(fields)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", field="tasks") from None
    hidden = {name: value for name, value in fields.items() if name.startswith("_") or name in hide}
    if "task_id" in hidden:
        raise ConfigError("hide: task_id can't be hidden: it names the group", field="hide")
    shown = {name: value for name, value in fields.items() if name not in hidden}
    return Task(fields["task_id"], shown, hidden, folder, timeout_s)


def _plain(value: Any) -> Any:
    """TOML -> JSON: dates and times as text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value
