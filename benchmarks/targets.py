"""What is measured: Steno and its peers, each started as its own documentation says, pinned to one core.

A target is an engine (pinned to the other core, with the load generator) and a proxy in front of it, and the URL that a client
uses. Peers come from PyPI (a virtual environment of their own) and from Debian (nginx).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.support.programs.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
CORES = [str(core) for core in sorted(os.sched_getaffinity(0))]
PROXY_CORE, LOAD_CORE = CORES[0], CORES[-1]
PEERS = ("rllm-model-gateway==0.1.0", "litellm[proxy]==1.106.2", "smg==1.13.0", "aiohttp==3.14.5", "uvloop==0.23.0")


def peers_environment(cache: Path) -> Path:
    """A virtual environment with the peers, made once and named after their pins; returns its bin folder."""
    home = cache / f"benchmark-peers-{sha256(' '.join(PEERS).encode()).hexdigest()[:12]}"
    done = home / "installed"
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin/pip"), "install", "-q", *PEERS], check=True)
        done.touch()
    return home / "bin"


@dataclass
class Running:
    """A started target.

    pids: the proxy's processes, whose CPU and memory are what is measured. worker_pid: of Steno's worker. redis_port, redis_pid:
    of its Redis, None where it has none.
    """

    url: str
    pids: list[int]
    worker_pid: int = 0
    redis_port: int | None = None
    redis_pid: int | None = None

    def cpu_s(self) -> float:
        """User + system seconds of the proxy's processes so far."""
        return sum(map(process_cpu_s, self._tree()))

    def rss_bytes(self) -> int:
        """Resident memory of the proxy's processes now."""
        total = 0
        for pid in self._tree():
            with contextlib.suppress(FileNotFoundError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmRSS:"):
                        total += int(line.split()[1]) * 1024
        return total

    def _tree(self) -> list[int]:
        found, todo = [], list(self.pids)
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(FileNotFoundError):
                todo += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found


def process_cpu_s(pid: int) -> float:
    """User + system seconds of a process and all of its threads so far, in clock ticks of 10 ms; 0.0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Launcher:
    """Starts processes, waits until they answer, ends them all."""

    def __init__(self, folder: Path, peers: Path | None) -> None:
        self.folder, self.peers = folder, peers
        self.children: list[subprocess.Popen[bytes]] = []

    def spawn(self, core: str, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        child = subprocess.Popen(
            ["taskset", "-c", core, *command], stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **(env or {})}
        )
        self.children.append(child)
        return child

    def ready(self, child: subprocess.Popen[bytes], url: str, timeout_s: float = 300) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if child.poll() is not None:
                raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if answer.status < 500:
                        return
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{child.args!r} was not ready after {timeout_s} s")

    def close(self) -> None:
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            if child.poll() is None:
                child.kill()
                child.wait()
        self.children.clear()

    def upstream(self) -> int:
        port = free_port()
        child = self.spawn(LOAD_CORE, "upstream", sys.executable, "-m", "benchmarks.upstream", "--port", str(port))
        self.ready(child, f"http://127.0.0.1:{port}/v1/models")
        return port

    # -- the targets ------------------------------------------------------------------------------------------------------

    def direct(self) -> Running:
        """No proxy at all: what the load generator and the engine give by themselves."""
        port = self.upstream()
        return Running(f"http://127.0.0.1:{port}/v1/chat/completions", [])

    def nginx(self) -> Running:
        up, port = self.upstream(), free_port()
        conf = self.folder / "nginx.conf"
        # As root its workers would run as nobody, who may not write into our folder.
        user = "user root; " if os.geteuid() == 0 else ""
        conf.write_text(
            f"{user}worker_processes 1; daemon off; pid {self.folder}/nginx.pid; error_log {self.folder}/nginx.err;\n"
            "worker_rlimit_nofile 16384; events { worker_connections 8192; }\n"
            f"http {{ access_log off; client_max_body_size 64m; client_body_temp_path {self.folder}/body;\n"
            f" proxy_temp_path {self.folder}/proxy; fastcgi_temp_path {self.folder}/f; uwsgi_temp_path {self.folder}/u;"
            f" scgi_temp_path {self.folder}/s;\n"
            f" upstream engine {{ server 127.0.0.1:{up}; keepalive 2048; }}\n"
            f" server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000;\n"
            '  location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";'
            " proxy_buffering off; proxy_read_timeout 600s; } } }\n"
        )
        child = self.spawn(PROXY_CORE, "nginx", "nginx", "-p", str(self.folder), "-c", str(conf))
        self.ready(child, f"http://127.0.0.1:{port}/v1/models")
        return Running(f"http://127.0.0.1:{port}/v1/chat/completions", [child.pid])

    def smg(self) -> Running:
        assert self.peers
        up, port = self.upstream(), free_port()
        child = self.spawn(
            PROXY_CORE,
            "smg",
            str(self.peers / "smg"),
            "launch",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--worker-urls",
            f"http://127.0.0.1:{up}",
            "--policy",
            "round_robin",
            "--prometheus-port",
            str(free_port()),
            "--log-level",
            "warn",
        )
        self.ready(child, f"http://127.0.0.1:{port}/readiness")
        return Running(f"http://127.0.0.1:{port}/v1/chat/completions", [child.pid])

    def aiohttp(self) -> Running:
        assert self.peers
        up, port = self.upstream(), free_port()
        child = self.spawn(
            PROXY_CORE,
            "aiohttp",
            str(self.peers / "python"),
            "-m",
            "benchmarks.passthrough",
            "--port",
            str(port),
            "--upstream",
            f"http://127.0.0.1:{up}",
        )
        self.ready(child, f"http://127.0.0.1:{port}/v1/models")
        return Running(f"http://127.0.0.1:{port}/v1/chat/completions", [child.pid])

    def litellm(self) -> Running:
        assert self.peers
        up, port = self.upstream(), free_port()
        conf = self.folder / "litellm.yaml"
        conf.write_text(
            "model_list:\n  - model_name: bench\n    litellm_params:\n      model: openai/bench\n"
            f"      api_base: http://127.0.0.1:{up}/v1\n      api_key: bench\n"
            "litellm_settings: {set_verbose: false, num_retries: 0}\n"
        )
        child = self.spawn(
            PROXY_CORE,
            "litellm",
            str(self.peers / "litellm"),
            "--config",
            str(conf),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--num_workers",
            "1",
            env={
                "LITELLM_LOG": "ERROR",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            },
        )
        self.ready(child, f"http://127.0.0.1:{port}/health/liveliness", 150)
        return Running(f"http://127.0.0.1:{port}/v1/chat/completions", [child.pid])

    def rllm(self) -> Running:
        assert self.peers
        up, port = self.upstream(), free_port()
        child = self.spawn(
            PROXY_CORE,
            "rllm",
            str(self.peers / "rllm-model-gateway"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--worker",
            f"http://127.0.0.1:{up}/v1",
            "--store",
            "memory",
            "--log-level",
            "WARNING",
        )
        self.ready(child, f"http://127.0.0.1:{port}/health")
        return Running(f"http://127.0.0.1:{port}/sessions/{{client}}/v1/chat/completions", [child.pid])

    def steno(self) -> Running:
        return self._steno()

    def steno_redis(self) -> Running:
        """With a real Redis on the other core, as a deployment would have it on another machine."""
        if not shutil.which("redis-server"):
            raise RuntimeError("redis-server is missing: apt-get install redis-server")
        port = free_port()
        child = self.spawn(
            LOAD_CORE,
            "redis",
            "redis-server",
            "--port",
            str(port),
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--dir",
            str(self.folder),
        )
        time.sleep(0.5)
        if child.poll() is not None:
            raise RuntimeError(f"redis-server ended; its log ends: {self.tail('redis')}")
        running = self._steno("--redis-url", f"redis://127.0.0.1:{port}/0", "--archive", str(self.folder / "archive"))
        running.redis_port, running.redis_pid = port, child.pid
        return running

    def steno_scripted(self) -> Running:
        """A whole `steno worker` on the scripted engine: for what a worker costs."""
        script = f"{ROOT / 'benchmarks/script.py'}:say"
        return self._steno(
            worker=[
                "steno",
                "worker",
                "--engine",
                "scripted",
                "--script",
                script,
                "--model",
                str(ROOT / "steno/models/tiny"),
                "--max-streams",
                "4096",
            ],
            engine_args=["--", "--pace-s", "0.02"],
        )

    def _steno(
        self, *extra: str, worker: Sequence[str] = ("benchmarks.worker",), engine_args: Sequence[str] = ()
    ) -> Running:
        port = free_port()
        proxy = self.spawn(
            PROXY_CORE,
            "steno-proxy",
            sys.executable,
            "-m",
            "steno",
            "proxy",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *extra,
        )
        self.ready(proxy, f"http://127.0.0.1:{port}/healthz")
        child = self.spawn(
            LOAD_CORE, "steno-worker", sys.executable, "-m", *worker, "--proxy", f"ws://127.0.0.1:{port}", *engine_args
        )
        self.ready(child, f"http://127.0.0.1:{port}/readyz")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            models = f"http://127.0.0.1:{port}/probe/v1/models"
            with contextlib.suppress(OSError), urllib.request.urlopen(models, timeout=30) as answer:
                if b'"id"' in answer.read():
                    return Running(f"http://127.0.0.1:{port}/{{client}}/v1/chat/completions", [proxy.pid], child.pid)
            if child.poll() is not None:
                raise RuntimeError(
                    f"the worker ended with {child.returncode}; its log ends: {self.tail('steno-worker')}"
                )
            time.sleep(0.1)
        raise RuntimeError(f"the worker did not announce its model; its log ends: {self.tail('steno-worker')}")

    def tail(self, name: str) -> str:
        """The end of a process's log: the folder is gone when the error is read."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-600:]


@contextlib.contextmanager
def started(name: str, folder: Path, peers: Path | None) -> Iterator[Running]:
    """Start a target by name, end its processes at the end whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(folder, peers)
    try:
        running: Running = getattr(launcher, name)()
        yield running
    finally:
        launcher.close()
