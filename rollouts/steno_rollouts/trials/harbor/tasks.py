"""Tasks of Harbor's: a folder of task folders, or one. Unlike tasks of commands they may have steps."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import storable
from steno_rollouts.tasks.task import CONFIGURATION, INSTRUCTION, Task, check_hidden, divided, is_task

STEPS = "steps"
VERIFIERS = "_verifiers"
"""Hidden field: the section `verifier` of each step, by its name."""
_HIDDEN = ("verifier", "solution")


def harbor_folders(path: Path) -> list[Path]:
    """The task folders below `path`, or `path` itself. Raises: ConfigError."""
    if is_task(path):
        return [path]
    found = [inner for inner in sorted(path.iterdir()) if is_task(inner)] if path.is_dir() else []
    if not found:
        raise ConfigError(f"harbor: {path} has no task (each task is a folder with a {CONFIGURATION})", field="harbor")
    return found


def harbor_tasks(folders: Iterable[Path], hide: Collection[str] = ()) -> list[Task]:
    """Raises: ConfigError naming the file and the field."""
    tasks = [_task(folder, hide) for folder in folders]
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise ConfigError(f"harbor: two tasks are named {task.task_id!r}", field="harbor")
        seen.add(task.task_id)
    check_hidden(hide, {name for task in tasks for name in task.hidden})
    return tasks


def _task(folder: Path, hide: Collection[str]) -> Task:
    where = folder / CONFIGURATION
    try:
        config = tomllib.loads(where.read_text(encoding="utf-8"))
        steps = config.get(STEPS, [])
        if not isinstance(steps, list) or not all(
            isinstance(step, dict) and isinstance(step.get("name"), str) for step in steps
        ):
            raise ConfigError(f"harbor: {where}: steps: must be tables, each with a name", field="harbor")
        told = [_step(folder, step) for step in steps]
        instruction = (
            "\n\n".join(step["instruction"] for step in told) if told else (folder / INSTRUCTION).read_text("utf-8")
        )
    except FileNotFoundError as error:
        raise ConfigError(f"harbor: {error.filename}: no such file", field="harbor") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"harbor: {where}: not valid TOML, or not readable: {error}", field="harbor") from None
    fields: dict[str, Any] = {**_plain(config), "task_id": folder.resolve().name, "instruction": instruction}
    if told:
        fields[STEPS] = told
        fields[VERIFIERS] = {step["name"]: _plain(step.get("verifier", {})) for step in steps}
    try:
        storable(fields)
    except ValueError as error:
        raise ConfigError(f"harbor: {where}: {error}", field="harbor") from None
    shown, hidden = divided(fields, (*hide, *_HIDDEN))
    return Task(fields["task_id"], shown, hidden, folder.resolve(), _timeout(config, where))


def _step(folder: Path, step: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in _plain(step).items() if name not in _HIDDEN}
    return {**shown, "instruction": (folder / STEPS / step["name"] / INSTRUCTION).read_text("utf-8")}


def _timeout(config: dict[str, Any], where: Path) -> float | None:
    agent = config.get("agent", {})
    found = agent.get("timeout_sec") if isinstance(agent, dict) else None
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float) or not found > 0):
        raise ConfigError(
            f"harbor: {where}: agent.timeout_sec: got {found!r}, must be a number of seconds", field="harbor"
        )
    return found


def _plain(value: Any) -> Any:
    """TOML -> JSON: dates and times as text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value
