"""A trial's folder on disk: `work/` with what the task brings, `task.json` with its fields, what the command printed.

    <root>/<trial_id>/work/       the command's working folder, STENO_WORKDIR
    <root>/<trial_id>/task.json   STENO_TASK_FILE
    <root>/<trial_id>/stdout.log, stderr.log
    <root>/<trial_id>.launcher    who has the folder, while an attempt runs

Blocking: called in threads; what writes into the folder by `written`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from steno.contracts.errors import ConfigError
from steno_rollouts.tasks.task import ENVIRONMENT, WITHHELD, Task
from steno_rollouts.trials import proc
from steno_rollouts.trials.reward import REWARD_JSON, REWARD_TEXT

T = TypeVar("T")
log = logging.getLogger(__name__)


class FolderInUse(ConfigError):
    """A launcher at another proxy runs a trial of the same name there. It ends these rollouts."""

    code = "folder_in_use"


@contextlib.contextmanager
def held(folder: Path, created_at: float) -> Iterator[None]:
    """Meanwhile no launcher at another proxy uses the folder: trials there may have the same names.

    Args: created_at: of the trial on record. Launchers at one proxy all know the same, and may take trials over from each other.
    Raises: FolderInUse: a launcher that runs has it.
    """
    note = folder.with_name(f"{folder.name}.launcher")
    own = f"{os.getpid()} {proc.began(os.getpid())} {created_at!r}"
    with contextlib.suppress(OSError, ValueError):  # a full disk, say, or no note of ours: then nobody can tell
        note.parent.mkdir(parents=True, exist_ok=True)
        try:
            note.symlink_to(own)  # a link is made whole, and never over another one
        except FileExistsError:
            pid, began, created = str(note.readlink()).split()
            if created != repr(created_at) and began == proc.began(int(pid)):
                raise FolderInUse(
                    f"work_dir: {folder} is in use: process {pid} runs a trial of this name at another proxy: give another --run",
                    field="work_dir",
                ) from None
            note.unlink()
            note.symlink_to(own)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if str(note.readlink()) == own:
                note.unlink()


async def written(write: Callable[..., T], *args: Any, **more: Any) -> T:
    """In a thread, to its end, also where this is cancelled: else it would go on writing into a folder that is being removed."""
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args, **more))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({writing})
        writing.exception()  # seen
        raise


def prepare(folder: Path, task: Task, *, environment: bool = True) -> tuple[Path, Path]:
    """Make it anew; nothing of an earlier attempt is left. Returns: the working folder, and the file with the task's fields.

    Args: environment: with the content of the task's `environment/`; not where an image is built of that.

    A file of the task that is named as a reward file is not copied: it would score every trial that says nothing.
    """
    work = begin(folder)
    if task.folder is not None:
        for source in sorted(task.folder.iterdir()):
            if source.name not in WITHHELD:
                _copy(source, work / source.name)
        if environment and (task.folder / ENVIRONMENT).is_dir():
            for source in sorted((task.folder / ENVIRONMENT).iterdir()):
                _copy(source, work / source.name)
        without_rewards(work)
    task_file = folder / "task.json"
    task_file.write_text(json.dumps(dict(task.fields), ensure_ascii=False), encoding="utf-8")
    return work, task_file


def begin(folder: Path) -> Path:
    """Make a trial's folder anew. Returns: its working folder, empty."""
    remove(folder)
    work = folder / "work"
    work.mkdir(parents=True)
    return work


def without_rewards(work: Path) -> None:
    """Remove what would score a trial that has not begun."""
    for name in (REWARD_JSON, REWARD_TEXT):
        (work / name).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Also where a trial has made folders read-only, as Go does with its modules.

    Raises: OSError, but not for a folder that is not there.
    """
    if not folder.exists():
        return
    try:
        try:
            shutil.rmtree(folder)
        except PermissionError:
            _make_writable(folder)
            shutil.rmtree(folder)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "folders too deep in one another", str(folder)) from None


def dispose(folder: Path, keep: bool) -> bool:
    """Remove it unless it is to be kept. What can't be removed stays, with a warning. Returns: whether it is there."""
    if not keep:
        try:
            remove(folder)
        except OSError as error:
            log.warning("%s can't be removed, and is kept: %s", folder, error)
    return os.path.exists(folder)  # noqa: PTH110  # False, too, where we may not look


def last_line(path: Path) -> str:
    """What a command said last, for people: one line of at most 200 characters that can be printed; "" for nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = next((line for line in reversed(lines) if line.strip()), "")
    return "".join(char if char.isprintable() else " " for char in said).strip()[:200]


def _make_writable(folder: Path) -> None:
    """A folder and all those below it, as far as they are ours: what is in a folder can't be removed without."""
    with contextlib.suppress(OSError):
        folder.chmod(stat.S_IRWXU)
    for parent, names, _ in os.walk(folder):  # looks into those below only once they are writable
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(OSError):
                if not path.is_symlink():  # what it leads to is no part of the trial
                    path.chmod(stat.S_IRWXU)


def copy_whole(source: Path, target: Path, script: str) -> None:
    """A folder of a task's that is mounted elsewhere, and whose script is run there. Links stay links, but for relative ones that
    lead out of it, as to a script that tasks share: their content is taken."""
    shutil.copytree(source, target, symlinks=True)
    root = Path(os.path.realpath(source))
    for folder, folders, files in os.walk(source):
        for name in (*folders, *files):
            link = Path(folder, name)
            if not link.is_symlink() or link.readlink().is_absolute():
                continue
            there, copy = Path(os.path.realpath(link)), target / link.relative_to(source)
            if there.is_relative_to(root):
                continue
            if there.is_dir():
                copy.unlink()
                shutil.copytree(there, copy, symlinks=True)
            elif there.is_file():
                copy.unlink()
                shutil.copy2(there, copy)
    if not (target / script).is_symlink():
        (target / script).chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    """In the place of what is there by this name, but folders are joined: never through a link, which may lead out of here."""
    is_folder = source.is_dir() and not source.is_symlink()
    if target.is_symlink() or (target.exists() and is_folder != target.is_dir()):
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()
    if is_folder and target.is_dir():
        for inner in sorted(source.iterdir()):
            _copy(inner, target / inner.name)
    elif is_folder:
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
