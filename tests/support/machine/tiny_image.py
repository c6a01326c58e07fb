"""An image of this machine's own Python and a few programs: made in seconds and without a registry.

It is no Debian: no package manager, and of the system what these programs load. A base by debootstrap (minbase with Python) took
33 s of processor time and 239 MB (2026-11-23), which storage without overlays copies for each image and each container.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

NAME = "localhost/steno-tiny:latest"
PROGRAMS = "sh ls cat sleep env id grep touch mkdir rm cp true setsid chmod".split()
_LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "site-packages", "dist-packages", "__pycache__", "config-*", "idlelib", "ensurepip", "lib2to3", "tkinter"
)  # fmt: skip


def make(
    folder: Path,
    engine: str,
    *,
    name: str = NAME,
    programs: Sequence[str] = PROGRAMS,
    add: Callable[[Path], None] = lambda root: None,
) -> str:
    """Args: folder: where its files are gathered. add: puts more into its root. Returns: its name."""
    root = folder / "root"
    stdlib = root / "usr/local/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(sysconfig.get_path("stdlib"), stdlib, ignore=_LEFT_OUT)
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), root / "usr/local/bin/python3")
    (root / "bin").mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found is not None, program
        shutil.copy2(Path(found).resolve(), root / "bin" / program)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    add(root)
    native = [path for path in (root / "usr/local/bin").iterdir() if path.open("rb").read(4) == b"\x7fELF"]
    for library in _libraries([*(root / "bin").iterdir(), *native, *stdlib.rglob("*.so")]):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library.resolve(), target)
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "--numeric-owner", "-cf", archive, "."], check=True)
    subprocess.run([engine, "import", archive, name], check=True, capture_output=True)
    return name


def _libraries(programs: list[Path]) -> set[Path]:
    """What the dynamic linker would load for them, itself included."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)}
