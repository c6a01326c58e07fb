"""A Docker daemon of the tests' own: Debian's, with `docker compose` beside its client, in a network namespace of its own.

Its bridges and rules of netfilter end with that, its files lie in a folder: what this machine has of Docker and Podman is left
alone, but for a key that Docker 20 makes in /etc/docker where there is none. Its sandboxes reach this machine through a pair of
interfaces. As root, with iproute2.

Asks: STENO_TEST_DOCKER: a folder with usr/sbin/dockerd, usr/bin/{docker,containerd,docker-init} and docker-compose (`.ci/run`
makes it).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.machine import network_namespace

FOLDER = Path(os.environ.get("STENO_TEST_DOCKER", ""))
START_S = 300.0


@contextlib.contextmanager
def docker_daemon(root: Path) -> Iterator[dict[str, str]]:
    """Args: root: a folder with a short path: sockets lie below it. Returns: variables by which programs find its client, its
    compose and itself."""
    (root / "config/cli-plugins").mkdir(parents=True)
    (root / "config/cli-plugins/docker-compose").symlink_to(FOLDER / "docker-compose")
    (root / "daemon.json").write_text("{}")
    path = os.pathsep.join([str(FOLDER / "usr/bin"), str(FOLDER / "usr/sbin"), os.environ["PATH"]])
    found = {"PATH": path, "DOCKER_HOST": f"unix://{root}/docker.sock", "DOCKER_CONFIG": str(root / "config")}
    environment = {**os.environ, **found}
    with network_namespace.made("dock", "203.0.113") as network, (root / "log").open("wb") as log:
        command = ["nsenter", f"--net=/run/netns/{network.name}", *_words(root)]
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as daemon:
            try:
                _until_it_answers(daemon, environment, root / "log")
                yield found
            finally:
                listed = subprocess.run(["docker", "ps", "-aq"], env=environment, capture_output=True, text=True)
                if left := listed.stdout.split():
                    subprocess.run(["docker", "rm", "--force", *left], env=environment, capture_output=True)
                daemon.terminate()
    for mounted in (root / "exec/netns").glob("*"):
        subprocess.run(["umount", "--lazy", mounted], capture_output=True)


def _words(root: Path) -> list[str]:
    """The daemon's command line: all its files lie in `root`, and it reads no configuration of this machine's Docker."""
    return [
        "dockerd", f"--config-file={root}/daemon.json", f"--data-root={root}/data", f"--exec-root={root}/exec",
        f"--pidfile={root}/pid", f"--host=unix://{root}/docker.sock", "--exec-opt=native.cgroupdriver=cgroupfs",
    ]  # fmt: skip


def _until_it_answers(daemon: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    until = time.monotonic() + START_S
    while subprocess.run(["docker", "info"], env=environment, capture_output=True).returncode:
        assert daemon.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.1)
