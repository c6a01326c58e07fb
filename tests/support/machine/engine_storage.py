"""Storage of its own for a container engine: what the machine's own Podman has is left alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.machine.docker_daemon import docker_daemon

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
    """A folder for what is made meanwhile; the engine's storage lies in it, for all processes that are started meanwhile. Docker
    has a daemon of its own too."""
    root = Path(tempfile.mkdtemp(prefix="steno-"))  # short: sockets lie below it
    try:
        with _podman(root) if engine == "podman" else docker_daemon(root) as variables:
            before = {name: os.environ.pop(name, None) for name in variables}
            os.environ.update(variables)
            try:
                yield root
            finally:
                for name in variables:
                    del os.environ[name]
                os.environ.update({name: value for name, value in before.items() if value is not None})
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _podman(root: Path) -> Iterator[dict[str, str]]:
    """Variables by which Podman finds its configuration."""
    found = {"CONTAINERS_STORAGE_CONF": str(root / "storage.conf"), "CONTAINERS_CONF": str(root / "containers.conf")}
    environment = {**os.environ, **found}
    (root / "containers.conf").write_text(_PODMAN.format(root=root))
    for driver in ("overlay", "vfs"):  # the latter where this machine's disk is an overlay already
        (root / "storage.conf").write_text(_STORAGE.format(root=root / driver, driver=driver))
        if subprocess.run(["podman", "info"], capture_output=True, env=environment).returncode == 0:
            break
    try:
        yield found
    finally:
        subprocess.run(["podman", "rm", "--all", "--force"], capture_output=True, env=environment)
        for layer in root.glob("*/graph/*"):
            subprocess.run(["umount", "--lazy", layer], capture_output=True)
