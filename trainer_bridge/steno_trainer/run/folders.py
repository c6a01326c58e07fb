"""Folders of one run: a trainer of another run would remove what lies there, since each keeps the newest only. And whether
these and the files of numbers can be written.

<checkpoint_dir>/run.json, <weights_dir>/run.json    {"run": …}, written by the first start and read by each later one
<checkpoint_dir>/trainer.lock    the trainer that runs there; locked while it does, if no proxy keeps another one of its run away

They are looked at before ranks are opened, and claimed once the start has the run, its model and its checkpoint: one that is
refused leaves them as they were, so that a run whose name was mistyped takes no folder from the one that was meant.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from steno.contracts.errors import ConfigError, TrainerAlive
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.run_config import RunSettings

log = logging.getLogger(__name__)

OWNER, LOCK = "run.json", "trainer.lock"
WRITTEN_S, LOOK_S = 1.0, 0.1
"""How long another start may take to write run.json, and the time between two looks at it."""


def look_at_folders(settings: RunSettings) -> None:
    """Whether all of them can be this run's. Makes those that are not there, and claims none.

    Raises: ConfigError: one is another run's, or can't be written: names the setting and that run.
    """
    runs = Lineages(settings.checkpoint_dir, settings.run).runs()  # of releases that wrote no run.json
    if runs and settings.run not in runs:
        folder = settings.checkpoint_dir
        raise _taken("checkpoint_dir", folder, sorted(runs)[0], settings.run, remove=folder)
    for field, folder in _folders(settings):
        _make(field, folder)
        with _can_be_written(field, folder):
            owner = _owner(folder / OWNER)
        if owner not in (None, settings.run):
            raise _taken(field, folder, owner, settings.run, remove=folder / OWNER)


def look_at_numbers(settings: RunSettings) -> None:
    """Whether the files of numbers can be written. Makes their folders.

    Raises: ConfigError: names the setting of one that can't.
    """
    if (file := settings.metrics_file) is not None:
        with _can_be_written("metrics_file", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
    if settings.tensorboard_dir is not None:
        _make("tensorboard_dir", settings.tensorboard_dir)
    if settings.wandb_project is not None:
        _make("wandb_dir", settings.wandb_dir)


def claim_folders(settings: RunSettings) -> None:
    """They are this run's from here on; on the first rank. None is claimed unless all can be.

    Raises: ConfigError, as `look_at_folders`.
    """
    look_at_folders(settings)
    for field, folder in _folders(settings):
        _claim(field, folder, settings.run)


@contextlib.contextmanager
def alone_in(folder: Path, run: str, trainer: str) -> Iterator[None]:
    """Hold the lock of this folder of checkpoints, so that a second trainer is refused. The lock of a killed trainer is free.
    Where the file system has no locks, nothing is held.

    Raises: TrainerAlive: another one is there: names it; ConfigError: the folder can't be written.
    """
    with _can_be_written("checkpoint_dir", folder):
        file = (folder / LOCK).open("a+")  # for writing: NFS refuses the lock otherwise
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TrainerAlive(
                f"checkpoint_dir: got {folder}, where trainer {file.read()} trains: each would remove what the "
                f"other one writes there; end that one first, or set a folder of its own",
                field="checkpoint_dir",
            ) from None
        except OSError as error:
            log.warning("%s can't be locked, so a second trainer there is not refused: %s", file.name, error)
        with _can_be_written("checkpoint_dir", folder):
            file.truncate(0)
            file.write(f"{trainer} (process {os.getpid()}) of run {run}")
            file.flush()
        yield


def _folders(settings: RunSettings) -> Iterator[tuple[str, Path]]:
    yield "checkpoint_dir", settings.checkpoint_dir
    if not settings.is_offline and settings.transport != "nccl":
        yield "weights_dir", settings.weights_dir


def _claim(field: str, folder: Path, run: str) -> None:
    path, mine = folder / OWNER, json.dumps({"run": run})
    with _can_be_written(field, folder):
        try:
            with path.open("x") as file:  # of two that begin at the same moment one has it
                file.write(mine)
                file.flush()
                os.fsync(file.fileno())
            return
        except FileExistsError:
            owner = _owner(path)
            until = time.monotonic() + WRITTEN_S
            while owner is None and time.monotonic() < until:
                time.sleep(LOOK_S)
                owner = _owner(path)
        if owner is None:  # whoever wrote it was killed in the middle
            path.write_text(mine)
            return
    if owner != run:
        raise _taken(field, folder, owner, run, remove=path)


def _make(field: str, folder: Path) -> None:
    with _can_be_written(field, folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def _can_be_written(field: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}: {path} can't be written: {error.strerror or error}", field=field) from error


def _owner(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["run"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _taken(field: str, folder: Path, owner: str | None, run: str, *, remove: Path) -> ConfigError:
    return ConfigError(
        f"{field}: got {folder}, where run {owner} began, and this is run {run}: each would remove what the other one has "
        f"there; set a folder of its own, or remove {remove} if nothing of run {owner} is wanted any more",
        field=field,
    )
