"""A real redis-server for tests: on a free port, in a directory of its own, ended with the test session."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

START_TIMEOUT_S = 20.0


class RedisServer:
    """Args: cluster: a cluster of one node that owns every slot.  options: redis-server's own, `--name value`.

    Raises RuntimeError when redis-server is not installed or does not come up.
    """

    def __init__(self, *, cluster: bool = False, options: tuple[str, ...] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="steno-redis-")
        self._cluster = cluster
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'+cluster' if self._cluster else ''}://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A plain synchronous client, for looking at what is stored."""
        return redis.Redis(port=self.port, socket_timeout=5)

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
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        if self._cluster:
            command += ["--cluster-enabled", "yes", "--cluster-port", str(_free_port())]
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
                if not self._cluster:
                    return True
                if client.execute_command("CLUSTER INFO")["cluster_slots_assigned"] != "16384":
                    client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
