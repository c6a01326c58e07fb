"""What benchmarks/rollouts.py runs its launchers against: Redis, a proxy with keys and a worker; an image; a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.targets import LOAD_CORE, PROXY_CORE, ROOT, Launcher, Running
from tests.support.machine import agents_image, tiny_image
from tests.support.machine.engine_storage import own_storage
from tests.support.programs.ports import free_port
from tests.support.sources import SOURCES

KEY = "key-of-the-benchmark"
NODES = "tests.integration.rollouts.executors.ray_nodes"
NULL = ROOT / "benchmarks/null_trial.sh"
IMAGE = "localhost/steno-null:latest"


def own_address() -> str:
    """This machine's, which sandboxes reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def stack(folder: Path) -> Iterator[Running]:
    """The proxy has a core to itself but for launchers and trials, which run on any."""
    launcher = Launcher(folder, None)
    redis_port, port = free_port(), free_port()
    steno, url = (sys.executable, "-m"), f"http://127.0.0.1:{port}"
    disk = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(folder))
    keys = {"STENO_ADMIN_KEY": KEY, "STENO_WORKER_KEY": KEY}
    try:
        redis = launcher.spawn(LOAD_CORE, "redis", "redis-server", "--port", str(redis_port), *disk)
        while not _listens(redis_port):
            if redis.poll() is not None:
                raise RuntimeError(f"redis-server ended; its log ends: {launcher.tail('redis')}")
            time.sleep(0.05)
        words = ("proxy", "--host", "0.0.0.0", "--port", str(port), "--redis-url", f"redis://127.0.0.1:{redis_port}/0")
        proxy = launcher.spawn(PROXY_CORE, "proxy", *steno, "steno", *words, "--log-level", "warning", env=keys)
        launcher.ready(proxy, f"{url}/healthz")
        told = ("--proxy", f"ws://127.0.0.1:{port}")
        worker = launcher.spawn(LOAD_CORE, "worker", *steno, "benchmarks.worker", *told, env=keys)
        until = time.monotonic() + 300
        while not _ready(f"{url}/readyz"):
            if worker.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the worker announced no model; its log ends: {launcher.tail('worker')}")
            time.sleep(0.1)
        yield Running(url, [proxy.pid], worker.pid, redis_port, redis.pid)
    finally:
        launcher.close()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(json.load(answer).get("status") == "ok")
    except OSError:  # HTTPError is one
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """A container engine with storage of its own, and `IMAGE` in it: Python, bash and the null trial."""

    def add(root: Path) -> None:
        (root / "opt").mkdir()
        shutil.copy2(NULL, root / "opt")
        agents_image.add_user(root)

    with own_storage(name) as root:
        tiny_image.make(root / "image", name, name=IMAGE, programs=agents_image.PROGRAMS, add=add)
        shutil.rmtree(root / "image")
        yield


@contextlib.contextmanager
def ray(python: str, folder: Path, places: int) -> Iterator[str]:
    """A cluster of a head and a node with so many places; its address."""
    with (folder / "ray.log").open("wb") as said:
        nodes = subprocess.Popen(
            [python, "-m", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": SOURCES},
        )  # fmt: skip
    assert nodes.stdin is not None and nodes.stdout is not None
    try:
        for node in ({"num_cpus": 0, "include_dashboard": False}, {"num_cpus": places}):
            nodes.stdin.write(json.dumps(["add", node]) + "\n")
            nodes.stdin.flush()
            address = str(json.loads(nodes.stdout.readline())[0])
        yield address
    finally:
        nodes.communicate(timeout=120)


@contextlib.contextmanager
def upstream(folder: Path, host: str, port: int) -> Iterator[None]:
    """An engine without Steno."""
    launcher = Launcher(folder, None)
    try:
        words = (sys.executable, "-m", "benchmarks.upstream", "--host", host, "--port", str(port))
        launcher.ready(launcher.spawn(LOAD_CORE, "upstream", *words), f"http://{host}:{port}/v1/models")
        yield
    finally:
        launcher.close()
