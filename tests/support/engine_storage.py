"""Storage of its own for a container engine: what the machine's own Podman has is left alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_STORAGE = """[storage]
driver = "{driver}"
graphroot = "{root}/graph"
runroot = "{root}/run"
"""
_PODMAN = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{root}/tmp"
"""


@contextlib.contextmanager
def own_storage(engine: str) -> Iterator[Path]:
    """A folder for what is made meanwhile; the engine's storage lies in it, for all processes that are started."""
    root = Path(tempfile.mkdtemp(prefix="steno-"))  # short: sockets lie below it
    os.environ["CONTAINERS_STORAGE_CONF"] = str(root / "storage.conf")
    os.environ["CONTAINERS_CONF"] = str(root / "containers.conf")
    (root / "containers.conf").write_text(_PODMAN.format(root=root))
    for driver in ("overlay", "vfs"):  # the latter where this machine's disk is an overlay already
        (root / "storage.conf").write_text(_STORAGE.format(root=root / driver, driver=driver))
        if subprocess.run([engine, "info"], capture_output=True).returncode == 0:
            break
    try:
        yield root
    finally:
        if engine == "podman":
            subprocess.run([engine, "rm", "--all", "--force"], capture_output=True)
            for layer in root.glob("*/graph/*"):
                subprocess.run(["umount", "--lazy", layer], capture_output=True)
        shutil.rmtree(root, ignore_errors=True)
