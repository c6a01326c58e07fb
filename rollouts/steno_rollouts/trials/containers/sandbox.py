"""What a task asks of its containers: image, limits, verifier. Values in, values out; the first bad one is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno_rollouts.config import IMAGE, RolloutSettings
from steno_rollouts.tasks.task import ENVIRONMENT, TESTS, Task

DOCKERFILE = "Dockerfile"
TEST_SCRIPT = "test.sh"
CPUS = 1.0
MEMORY_MB = 2048
MIN_MEMORY_MB = 16
"""Less starts no process."""


@dataclass(frozen=True)
class Sandbox:
    """image: by name; None: built from `context`. tests: the folder with `test.sh`; None: the task has none."""

    image: str | None
    context: Path | None
    cpus: float
    memory_mb: int
    tests: Path | None
    verifier_timeout_s: float


def sandboxes(tasks: Iterable[Task], settings: RolloutSettings) -> dict[str, Sandbox]:
    """By the task's name. Raises: ConfigError naming the first task that can't be run in containers, and the field."""
    return {task.task_id: sandbox(task, settings) for task in tasks}


def sandbox(task: Task, settings: RolloutSettings) -> Sandbox:
    where = f"tasks: {task.named}"
    section = _section(task, "environment", where)
    environment = task.folder / ENVIRONMENT if task.folder else None
    context = environment if environment and (environment / DOCKERFILE).is_file() else None
    image = None
    for name, value in (("image", task.fields.get("image")), ("environment.docker_image", section.get("docker_image"))):
        if value is not None:
            image = _image(value, f"{where}: {name}")
            break
    if image is None and context is None:
        if settings.image is None:
            raise ConfigError(
                f"{where}: has no image: give it {ENVIRONMENT}/{DOCKERFILE}, a field image, or --image for all that have none",
                field="tasks",
            )
        image = settings.image
    cpus = settings.cpus or _number(section.get("cpus"), CPUS, 0.01, f"{where}: environment.cpus")
    memory_mb = settings.memory_mb or _number(
        section.get("memory_mb"), MEMORY_MB, MIN_MEMORY_MB, f"{where}: environment.memory_mb"
    )
    timeout_s = _number(
        _section(task, "verifier", where).get("timeout_sec"),
        settings.reward_timeout_s,
        0.001,
        f"{where}: verifier.timeout_sec",
    )
    return Sandbox(
        image, None if image else context, cpus, int(memory_mb), _tests(task, settings, where), float(timeout_s)
    )


def digest(context: Path) -> str:
    """Of all that a Dockerfile can copy: names, contents, links, and what may be executed."""
    found = blake2b(digest_size=16)
    for path in sorted(context.rglob("*")):
        if path.is_symlink():
            kind, content = "link", str(path.readlink()).encode()
        elif path.is_file():
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            content = path.read_bytes()
        else:
            kind, content = "folder", b""
        name = str(path.relative_to(context)).encode(errors="surrogateescape")
        found.update(b"%d %s %s %d " % (len(name), name, kind.encode(), len(content)) + content)
    return found.hexdigest()


def _tests(task: Task, settings: RolloutSettings, where: str) -> Path | None:
    if task.folder is None or settings.reward is not None or not (task.folder / TESTS).is_dir():
        return None
    if not (task.folder / TESTS / TEST_SCRIPT).is_file():
        raise ConfigError(
            f"{where}: {TESTS}/ has no {TEST_SCRIPT}: give it one, or a reward function (--reward)", field="tasks"
        )
    return task.folder / TESTS


def _section(task: Task, name: str, where: str) -> Mapping[str, Any]:
    found = task.fields.get(name, task.hidden.get(name, {}))
    if not isinstance(found, Mapping):
        if task.folder is None:  # a field of JSON lines may mean anything
            return {}
        raise ConfigError(f"{where}: {name}: got {found!r}, must be a table", field="tasks")
    return found


def _image(value: Any, where: str) -> str:
    if not isinstance(value, str) or not IMAGE.fullmatch(value):
        raise ConfigError(f"{where}: got {value!r}, must be the name of an image", field="tasks")
    return value


def _number(value: Any, default: float, least: float, where: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ConfigError(f"{where}: got {value!r}, must be a number of at least {least:g}", field="tasks")
    return value
