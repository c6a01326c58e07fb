"""A trial's command line and environment, from its task and its addresses. Values in, values out.

`{field}` in a word of the command is the task's field, `{metadata.difficulty}` one inside another, `{OPENAI_BASE_URL}` a variable
of the trial's environment; `{{` and `}}` around a name leave it alone, and so does a `$` before it. A field that a task
does not have is an error before anything runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.contracts.rest import Trial
from steno_rollouts.tasks.selection import lookup
from steno_rollouts.tasks.task import Task

NO_KEY = "none"
"""For a proxy that asks for no key: clients insist on having one."""
MAX_VARIABLE_BYTES = 100_000
"""Linux takes 128 KiB in one variable or word. A longer field is in STENO_TASK_FILE only."""
_PROVIDERS = (
    "OPENAI_API_KEY OPENAI_BASE_URL OPENAI_API_BASE OPENAI_ORG_ID OPENAI_PROJECT_ID ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN "
    "ANTHROPIC_BASE_URL GEMINI_API_KEY GOOGLE_API_KEY GOOGLE_GEMINI_BASE_URL"
).split()
"""Taken out of what a trial inherits: an operator's own key must not reach an agent, nor send it past the proxy."""
_FOLDERS = ("PWD", "OLDPWD")
"""Taken out too: they name where the operator is, which mostly holds the tasks; a trial is in a folder of its own."""
VARIABLES = (
    "OPENAI_BASE_URL OPENAI_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_API_KEY GOOGLE_GEMINI_BASE_URL GEMINI_API_KEY STENO_TRIAL_ID "
    "STENO_GROUP_ID STENO_WORKDIR STENO_TASK_FILE"
).split()
"""What each trial's environment has, beside its task's fields as STENO_TASK_<FIELD>."""
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|(?<!\$)\{([A-Za-z_][\w.]*)\}")


def check_command(command: Sequence[str], tasks: Iterable[Task]) -> None:
    """Raises: ConfigError: no command; a placeholder that some task has no field for, naming both, or one with a
    NUL; one that shows a key."""
    if not command:
        raise ConfigError("command: empty: give the command of a trial after --", field="command")
    names = {found[2] for word in command for found in _PLACEHOLDER.finditer(word) if found[2]}
    shown = sorted(name for name in names if name in VARIABLES and name.endswith("_API_KEY"))
    if shown:
        raise ConfigError(
            f"command: {{{shown[0]}}} would show the key to every process: use the variable ${shown[0]}",
            field="command",
        )
    fields = sorted(names - {*VARIABLES})
    for task in tasks:
        missing = [name for name in fields if lookup(task.fields, name) is None]
        if missing:
            words = ", ".join(f"{{{name}}}" for name in missing)
            raise ConfigError(
                f"command: {words}: task {task.named} has no such field; it has {', '.join(sorted(task.fields))} "
                "(double the braces to pass them on as they are)",
                field="command",
            )
        for name in fields:
            _check_nul(task, name, _text(lookup(task.fields, name)))
        _variables(task)


def fill(command: Sequence[str], task: Task, environment: Mapping[str, str]) -> list[str]:
    """The words to run, each placeholder replaced. `check_command` must have passed."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        name = found[2]
        return environment[name] if name in VARIABLES else _text(lookup(task.fields, name))

    return [_PLACEHOLDER.sub(value, word) for word in command]


def environment(
    inherited: Mapping[str, str], trial: Trial, task: Task, workdir: Path, task_file: Path
) -> dict[str, str]:
    """What a trial's processes are given: what these rollouts inherited, without Steno's own settings and anybody's provider
    keys, and the trial's addresses, key and task."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _PROVIDERS and name not in _FOLDERS and not name.upper().startswith("STENO_")
    }
    key = trial.api_key or NO_KEY
    values = (
        trial.urls["openai"], key, trial.urls["anthropic"], key, trial.urls["gemini"], key, trial.session.trial_id,
        trial.session.group_id or "", str(workdir), str(task_file),
    )  # fmt: skip
    return {**kept, **_variables(task), **dict(zip(VARIABLES, values, strict=True))}


def _variables(task: Task) -> dict[str, str]:
    """STENO_TASK_<FIELD> of each field that is short enough. Raises: ConfigError: two fields with one name, a NUL."""
    names: dict[str, str] = {}
    variables: dict[str, str] = {}
    for field, value in task.fields.items():
        name = "STENO_TASK_" + re.sub(r"\W", "_", field, flags=re.ASCII).upper()
        if name in names or name in VARIABLES:
            raise ConfigError(
                f"task {task.named}: {field!r} and {names.get(name, 'the task file')!r} would both be {name}",
                field="tasks",
            )
        names[name] = field
        text = _text(value)
        _check_nul(task, field, text)
        if len(text.encode()) <= MAX_VARIABLE_BYTES:
            variables[name] = text
    return variables


def _check_nul(task: Task, field: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"task {task.named}: {field!r} contains a NUL byte", field="tasks")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
