"""An image of this machine's own Python and a few programs: made in seconds and without a registry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "localhost/steno-tiny:latest"
PROGRAMS = "sh ls cat sleep env id grep touch mkdir rm cp true setsid chmod".split()
_LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "site-packages", "dist-packages", "__pycache__", "config-*", "idlelib", "ensurepip", "lib2to3", "tkinter"
)  # fmt: skip


def make(folder: Path, engine: str) -> str:
    """Args: folder: where its files are gathered. Returns: its name."""
    root = folder / "root"
    stdlib = root / "usr/local/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(sysconfig.get_path("stdlib"), stdlib, ignore=_LEFT_OUT)
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), root / "usr/local/bin/python3")
    (root / "bin").mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None, name
        shutil.copy2(Path(found).resolve(), root / "bin" / name)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    for library in _libraries([*(root / "bin").iterdir(), root / "usr/local/bin/python3", *stdlib.rglob("*.so")]):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library.resolve(), target)
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "--numeric-owner", "-cf", archive, "."], check=True)
    subprocess.run([engine, "import", archive, NAME], check=True, capture_output=True)
    return NAME


def _libraries(programs: list[Path]) -> set[Path]:
    """What the dynamic linker would load for them, itself included."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)}
