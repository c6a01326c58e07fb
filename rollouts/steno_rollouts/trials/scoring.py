"""What scores trials, and must be out of their reach: a trial could copy its answers from it, or change it and be rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steno_rollouts.tasks.rows import is_rows
from steno_rollouts.tasks.task import CONFIGURATION, ENVIRONMENT, WITHHELD

MOST_KEPT = 256
"""Entries beside the tasks that each trial sees as they are: each is a mount, and many take seconds."""
_DATA = frozenset({"data", "dataset_dict.json", "dataset_info.json", "state.json"})
_DATA_ENDS = frozenset({".arrow", ".parquet"})


@dataclass(frozen=True)
class TaskSource:
    """Where tasks come from. root: a file, or a folder. kept: of a folder, what is no task: an agent's program, say."""

    root: Path
    kept: tuple[Path, ...] = ()


def task_source(path: Path | None, command: Sequence[str]) -> TaskSource | None:
    """What is to be hidden of `path`: a trial has its own copy of its task. None: nothing; the command names it, or it is not on
    this machine."""
    if path is None or not path.exists():
        return None
    root = path.resolve()
    if not root.is_dir():
        return None if _names(command, path) else TaskSource(root)
    if (root / CONFIGURATION).is_file():
        kept = [one for one in root.iterdir() if one.name not in WITHHELD - {ENVIRONMENT}]
    elif is_rows(root):
        kept = [one for one in root.iterdir() if not _is_data(one)]
    else:
        kept = [one for one in root.iterdir() if not (one / CONFIGURATION).is_file()]
    return TaskSource(root, tuple(sorted(one for one in kept if one.exists())))


def reward_file(reward: str | None, command: Sequence[str]) -> list[Path]:
    """Args: reward: `FILE.py:function`. Returns: the file, unless the command names it too."""
    path = Path(reward.rpartition(":")[0]) if reward else None
    return [] if path is None or _names(command, path) else [path.resolve()]


def _names(command: Sequence[str], path: Path) -> bool:
    return any(str(path) in word or str(path.resolve()) in word for word in command)


def _is_data(path: Path) -> bool:
    return path.name in _DATA or path.suffix in _DATA_ENDS or (path / "state.json").is_file()
