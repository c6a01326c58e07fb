"""Folders on this machine: weights, checkpoints, keys, Redis's data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from steno_cli.doctor.findings import Finding, bad, ok, warning

ALMOST_FULL = 0.1
"""Of a disk that is still free: a full one ends checkpoints, weights and Redis's file at once."""


def check_folder(folder: Path) -> Iterator[Finding]:
    check = "disk"
    if not folder.is_dir():
        yield bad(check, f"{folder} is no folder", "make it, or correct --folder")
        return
    if not os.access(folder, os.W_OK):
        yield bad(check, f"{folder} can't be written by this user", "chown it to the program's user")
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.0f} GiB free"
    if usage.free < ALMOST_FULL * usage.total:
        yield warning(check, text, "free some: checkpoints and full copies of the weights need room for two at a time")
    else:
        yield ok(check, text)
