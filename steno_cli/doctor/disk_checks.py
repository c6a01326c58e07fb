"""Folders on this machine: weights, checkpoints, keys, Redis's data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from steno_cli.doctor.findings import Finding, bad, ok, warning

ALMOST_FULL = 0.1
"""A smaller free share of a disk is a warning: a full disk ends checkpoints, weights and Redis's file at once."""


def check_folder(folder: Path) -> Iterator[Finding]:
    """Whether the folder is there, this user can write to it, and its disk has free space."""
    check = "disk"
    try:
        there, usage = folder.is_dir(), shutil.disk_usage(folder)
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except OSError as error:
        yield bad(
            check, f"{folder}: {error.strerror}", "make the program's user its owner (chown), or correct --folder"
        )
        return
    if not there:
        yield bad(check, f"{folder} is not a folder", "create it, or correct --folder")
        return
    if not os.access(folder, os.W_OK):
        yield bad(check, f"this user can't write to {folder}", "make the program's user its owner (chown)")
    text = f"{folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.0f} GiB free"
    if usage.free < ALMOST_FULL * usage.total:
        yield warning(
            check, text, "free disk space: it must hold two checkpoints and two full copies of the weights at a time"
        )
    else:
        yield ok(check, text)
