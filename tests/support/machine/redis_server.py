"""A real redis-server for tests: on a free port, in a directory of its own, ended with the test session."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from tests.support.programs.ports import free_port

START_TIMEOUT_S = 60.0
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
"""Free there, or its files are on the disk. A container has 64 MB of it."""
PATIENT = {"reply_timeout_s": 60.0, "call_timeout_s": 120.0}
"""A `RedisStore`'s bounds where they are not the subject: how long a busy machine takes to write to its disk is no matter."""


def memory() -> Path | None:
    """Where files are kept: a disk that others write to may keep each fsync waiting for seconds."""
    there = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    return MEMORY if there and shutil.disk_usage(MEMORY).free > MEMORY_BYTES else None


class RedisServer:
    """Args: cluster: a cluster of one node that owns every slot.  slots: False: one that owns none yet.
    options: redis-server's own, `--name value`.

    Raises RuntimeError when redis-server is not installed or does not come up.
    """

    def __init__(self, *, cluster: bool = False, slots: bool = True, options: tuple[str, ...] = ()) -> None:
        self._slots = slots
        self._directory = tempfile.TemporaryDirectory(prefix="steno-redis-", dir=memory())
        self._cluster = cluster
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'+cluster' if self._cluster else ''}://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A plain synchronous client, for looking at what is stored."""
        return redis.Redis(port=self.port, socket_timeout=60)

    def start(self) -> None:
        """Also starts it again, on the same port and data, after `kill`."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("these tests need redis-server on the PATH: apt-get install redis-server (7.0 or newer)")
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            self._directory.name,
            "--save",
            "",
        ]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        if self._cluster:
            command += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        log = Path(self._directory.name) / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen([*command, *self._options], stdout=output, stderr=output)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
                if not (self._cluster and self._slots):
                    return True
                if client.execute_command("CLUSTER INFO")["cluster_slots_assigned"] != "16384":
                    client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
            return False

    def follow(self, port: int, *, within_s: float = 60.0) -> None:
        """Become a replica of what is reached at this port, and catch up."""
        with self.client() as client:
            client.replicaof("127.0.0.1", port)
        self.until(lambda info: info["master_link_status"] == "up", within_s)

    def promote(self) -> None:
        """Become a primary, with what is here."""
        with self.client() as client:
            client.replicaof("NO", "ONE")

    def until(self, said: Callable[[dict[str, Any]], bool], within_s: float = 60.0) -> None:
        """Wait for what `INFO replication` says."""
        deadline = time.monotonic() + within_s
        with self.client() as client:
            while not said(info := client.info("replication")):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"redis-server on port {self.port}: {info}")
                time.sleep(0.05)

    def pause(self) -> None:
        """It keeps its sockets and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        self.resume()
        self.kill()
        self._directory.cleanup()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class RedisSentinel:
    """A Sentinel that watches one primary as `service`; two of three decide.

    Args: primary_port: as replicas find it as well. down_after_s: of silence, until it takes the primary for dead.
    """

    def __init__(
        self, primary_port: int, *, service: str = "steno", quorum: int = 2, down_after_s: float = 1.0
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="steno-sentinel-", dir=memory())
        self.port = free_port()
        config = Path(self._directory.name) / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._directory.name}\n"
            f"sentinel monitor {service} 127.0.0.1 {primary_port} {quorum}\n"
            f"sentinel down-after-milliseconds {service} {round(1000 * down_after_s)}\n"
            f"sentinel failover-timeout {service} 4000\n"
        )
        with (Path(self._directory.name) / "log").open("ab") as output:
            command = [shutil.which("redis-server") or "redis-server", str(config), "--sentinel"]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def knows(self, service: str, *, others: int, replicas: int, within_s: float = 60.0) -> None:
        """Wait until it has found so many other Sentinels and replicas."""
        deadline = time.monotonic() + within_s
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            while True:
                try:
                    found = client.sentinel_masters().get(service, {})
                except (redis.ConnectionError, redis.TimeoutError):
                    found = {}
                if (found.get("num-other-sentinels"), found.get("num-slaves")) == (others, replicas):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a Sentinel knows only {found}")
                time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()
