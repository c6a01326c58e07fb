"""The tiny image with agents as they come from PyPI and npm: mini-swe-agent and Claude Code, which is one native program."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.machine import tiny_image

NAME = "localhost/steno-agents:latest"
_VENV, _NPM = (Path(os.environ.get(name, "")) for name in ("STENO_AGENTS_VENV", "STENO_AGENTS_NPM"))
PROGRAMS = (
    *tiny_image.PROGRAMS,
    *"bash tar tee mv ln pwd chown find sed head tail sort wc dirname basename".split(),
    *"readlink uname date kill ps tr cut stat nl timeout".split(),
)
_LEFT_OUT = frozenset("pyarrow pandas numpy numpy.libs datasets agents pip setuptools".split())
"""Large, and of other agents."""
_MINI = """#!/usr/local/bin/python3
from minisweagent.run.mini import app
app()
"""


def make(folder: Path, engine: str) -> str:
    """Args: folder: where its files are gathered. Returns: its name. Asks: STENO_AGENTS_VENV, STENO_AGENTS_NPM."""

    def add(root: Path) -> None:
        (packages,) = (_VENV / "lib").glob("python3*/site-packages")
        (inside,) = (root / "usr/local/lib").glob("python3*")
        shutil.copytree(
            packages,
            inside / "site-packages",
            ignore=lambda at, names: (_LEFT_OUT if Path(at) == packages else set()) & set(names) | {"__pycache__"},
        )
        programs = root / "usr/local/bin"
        (programs / "mini-swe-agent").write_text(_MINI)
        (programs / "mini-swe-agent").chmod(0o755)
        (native,) = (_NPM / "node_modules/@anthropic-ai/claude-code/bin").iterdir()
        shutil.copy2(native, programs / "claude")
        add_user(root)

    return tiny_image.make(folder, engine, name=NAME, programs=PROGRAMS, add=add)


def add_user(root: Path) -> None:
    """What Harbor asks of an image beside `PROGRAMS`: a user called root."""
    for folder in ("etc", "root", "usr/bin"):
        (root / folder).mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "usr/bin/env").symlink_to("/bin/env")
