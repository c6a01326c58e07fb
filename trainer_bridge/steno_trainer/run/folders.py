"""Folders of one run: a trainer of another run would remove what lies there, since each keeps the newest only.

<checkpoint_dir>/run.json, <weights_dir>/run.json    {"run": …}, written by the first start and read by each later one
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from steno.contracts.errors import ConfigError
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.run_config import RunSettings

OWNER = "run.json"
WRITTEN_S, LOOK_S = 1.0, 0.1
"""For as long another start may be writing it, and between two looks."""


def claim_folders(settings: RunSettings) -> None:
    """They are this run's from here on; on the first rank, before the model is loaded.

    Raises: ConfigError: one is another run's, or can't be written: names the setting and that run.
    """
    runs = Lineages(settings.checkpoint_dir, settings.run).runs()  # of releases that wrote no run.json
    if runs and settings.run not in runs:
        raise _taken("checkpoint_dir", settings.checkpoint_dir, sorted(runs)[0], settings.run)
    _claim("checkpoint_dir", settings.checkpoint_dir, settings.run)
    if not settings.is_offline and settings.transport != "nccl":
        _claim("weights_dir", settings.weights_dir, settings.run)


def _claim(field: str, folder: Path, run: str) -> None:
    path, mine = folder / OWNER, json.dumps({"run": run})
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
    except OSError as error:
        raise ConfigError(f"{field}: {folder} can't be written: {error.strerror or error}", field=field) from error
    if owner != run:
        raise _taken(field, folder, owner, run)


def _owner(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["run"])
    except (ValueError, KeyError, TypeError):
        return None


def _taken(field: str, folder: Path, owner: str, run: str) -> ConfigError:
    return ConfigError(
        f"{field}: got {folder}, where run {owner} began, and this is run {run}: each would remove what the other one has "
        f"there; set a folder of its own, or remove that one if it is not needed any more",
        field=field,
    )
