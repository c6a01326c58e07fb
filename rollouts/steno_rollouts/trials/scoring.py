"""What scores trials, and must be out of their reach: a trial could copy its answers from it, or change it and be rewarded."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steno_rollouts.tasks.rows import is_rows
from steno_rollouts.tasks.task import ENVIRONMENT, WITHHELD, is_task

MOST_KEPT = 256
"""Entries beside the tasks that each trial sees as they are: each is a mount, and many take seconds."""
_COPIES = frozenset({".git", ".hg", ".svn", ".cache"})
"""Hold the tasks too, as they were or are."""
_DATA = frozenset({"data", "dataset_dict.json", "dataset_info.json", "state.json"})
_DATA_ENDS = frozenset({".arrow", ".parquet"})


@dataclass(frozen=True)
class TaskSource:
    """Where tasks come from. root: a file, or a folder. kept: of a folder, what is no task, where the command needs something of
    it: an agent's program, say. elsewhere: folders of tasks that are links here."""

    root: Path
    kept: tuple[Path, ...] = ()
    elsewhere: tuple[Path, ...] = ()


def task_source(path: Path | None, command: Sequence[str]) -> TaskSource | None:
    """What is to be hidden of `path`: a trial has its own copy of its task. None: nothing; the command names it, or it is not on
    this machine."""
    if path is None or not path.exists():
        return None
    root = path.resolve()
    if not root.is_dir():
        return None if _names(command, path) else TaskSource(root)
    try:
        inside = sorted(root.iterdir())
        linked = tuple(one.resolve() for one in inside if one.is_symlink() and is_task(one))
        if not _is_needed(root, command):
            return TaskSource(root, elsewhere=linked)
        if is_task(root):
            kept = [one for one in inside if one.name not in WITHHELD - {ENVIRONMENT}]
        elif not any(map(is_task, inside)) and is_rows(root):
            kept = [one for one in inside if not _is_data(one)]
        else:
            kept = [one for one in inside if not is_task(one)]
    except OSError:  # who may not look at it can't tell what is in it
        return TaskSource(root)
    return TaskSource(root, tuple(one for one in kept if one.name not in _COPIES), linked)


def reward_file(reward: str | None, command: Sequence[str]) -> list[Path]:
    """Args: reward: `FILE.py:function`. Returns: the file, unless the command names it too."""
    path = Path(reward.rpartition(":")[0]) if reward else None
    return [] if path is None or _names(command, path) else [path.resolve()]


def _names(command: Sequence[str], path: Path) -> bool:
    """Whether a word is this path, or has it inside (`--data=FILE`, `sh -c '… FILE'`), and not as a part of a longer name."""
    found = [re.compile(rf"(?<![\w.-]){re.escape(str(one))}(?![\w.-])") for one in (path, path.resolve())]
    return any(one.search(word.removeprefix("./")) for one in found for word in command)


def _is_needed(root: Path, command: Sequence[str]) -> bool:
    """Whether something in there is needed to run the command, as far as anybody can tell."""
    words = [*command, shutil.which(command[0]) or "" if command else ""]
    words += [os.environ.get(name, "") for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV")]
    if any(str(root) in word for word in words):
        return True
    places = [Path.cwd(), Path.home(), Path(sys.prefix)]
    return any(place.is_relative_to(root) or place.resolve().is_relative_to(root) for place in places)


def _is_data(path: Path) -> bool:
    return path.name in _DATA or path.suffix in _DATA_ENDS or os.path.isfile(path / "state.json")  # noqa: PTH113
