"""`python -m steno ...` as a fork of a process that has imported what it imports.

Starting a worker takes seconds of processor time for torch's imports alone, and tests start hundreds of programs. The program is
a process of its own all the same, with its own pid, environment, folder and exit code: `steno/__main__.py` runs in it from its
first line to its last, and the interpreter ends as ever. That a fresh interpreter finds all it needs is played where the lines of
the documentation are (tests/integration/face/test_documented.py), by the command line's own tests, the demos and the images.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.sources import ROOT

_PROXY = (
    "steno_cli.main",
    "steno_cli.commands.serve",
    "steno_cli.terminal.flags",
    "steno_proxy.server.app",
    "steno_proxy.archive.archiver",
    "steno_proxy.store.redis.store",
)
_WORKER = (
    "steno_cli.main",
    "steno_cli.commands.serve",
    "steno_cli.terminal.flags",
    "steno_worker.main",
    "steno_worker.engines.scripted.engine",
    "steno_worker.engines.transformers.engine",
    "uvloop",
)
_COMMAND = (
    "steno_cli.main",
    "steno_cli.commands.doctor",
    "steno_cli.commands.env",
    "steno_cli.commands.rollout",
    "steno_cli.commands.runs",
    "steno_cli.commands.sessions",
    "steno_cli.commands.tasks",
    "steno_cli.terminal.flags",
    "steno_rollouts.build",
)
_TORCHRUN = ("steno_cli.torchrun", "tests.support.forked_ranks")
_COMMANDS = ("doctor", "env", "groups", "rollout", "runs", "sessions", "tasks")
_LITELLM = (*_PROXY, "steno_cli.commands.upstream", "steno_worker.engines.litellm.text", "uvloop")
_READ_LATER = ("STENO_", "XDG_DATA_HOME", "PYTEST_", "PYTHONUNBUFFERED", "COLUMNS")
"""Variables that nothing reads while it is imported: they may differ from those of the process that forks."""
_SET_BY_IMPORTS = ("LITELLM_LOCAL_MODEL_COST_MAP", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_")
"""By litellm's engine, DeepSpeed and torch, where a test has imported them. What forks has them as its own imports set them."""
_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""What DeepSpeed and torch look at while they are imported. Only programs that have the first one like this are forks."""


class Program:
    """What the tests use of a `subprocess.Popen`."""

    def __init__(self, args: list[str], pid: int, status: socket.socket) -> None:
        self.args, self.pid, self._status = args, pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            said = self._status.recv(64)
            assert said, f"the process that forked {self.args} is gone"
            self.returncode = int(said)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Program | subprocess.Popen[bytes]


class _Forker:
    """A process that has imported `modules` and forks on demand; it ends with the one that made it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno()), *modules]
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            if modules == _TORCHRUN:
                environment |= _CPU
            self.process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )

    def start(
        self, args: list[str], environment: Mapping[str, str], cwd: Path, out: IO[bytes], err: IO[bytes]
    ) -> Program:
        status, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("rb") as nothing:
            order = json.dumps(
                {"module": args[2], "args": args[3:], "environment": dict(environment), "cwd": str(cwd)}
            ).encode()
            socket.send_fds(self._socket, [order], [nothing.fileno(), out.fileno(), err.fileno(), theirs.fileno()])
        pid = self._socket.recv(64)
        assert pid, f"the process that forks ended with {self.process.wait()}"
        return Program(args, int(pid), status)


_forkers: dict[tuple[str, ...], _Forker] = {}
AT_FIRST = dict(os.environ)
"""The environment that forked programs have imported in."""


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, cwd: Path = ROOT, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """A program to its end, with what it printed, as `subprocess.run` does. It is killed after `timeout` seconds.

    Args: environment: beside that of the tests.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = start(command, {**os.environ, **(environment or {})}, cwd, out, err)
        try:
            code = child.wait(timeout)
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read().decode(), err.read().decode())


def start(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, out: IO[bytes], err: IO[bytes] | None = None
) -> Started:
    """A program with its output in `out`, with `err` apart from it or not, and nothing to read: a fork where it is a command of
    this Python's `-m steno` that tests start often, or torchrun on CPUs."""
    err = err or out
    modules = _modules(command)
    imported_in = {**AT_FIRST, "CUDA_VISIBLE_DEVICES": ""} if modules == _TORCHRUN else AT_FIRST
    changed = {name for name in {*environment, *imported_in} if environment.get(name) != imported_in.get(name)}
    if modules is None or any(not name.startswith(_READ_LATER + _SET_BY_IMPORTS) for name in changed):
        return subprocess.Popen(
            command, cwd=cwd, env=dict(environment), stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
    if modules not in _forkers:
        _forkers[modules] = _Forker(modules)
    return _forkers[modules].start(list(command), environment, cwd, out, err)


def _modules(command: Sequence[str]) -> tuple[str, ...] | None:
    if list(command[:3]) == [sys.executable, "-m", "steno_cli.torchrun"]:
        return _TORCHRUN
    if list(command[:3]) != [sys.executable, "-m", "steno"]:
        return None
    words = set(command[4:])
    match command[3]:
        case "proxy":
            return _LITELLM if "--upstream" in words else _PROXY
        case "worker" if words.isdisjoint({"vllm", "litellm"}):  # with no word about it, the engine is transformers
            return _WORKER
        case name if name in _COMMANDS:
            return _COMMAND
    return None


def _fork_on_demand(orders: socket.socket) -> str:
    """Until the other end is gone. Returns in each fork, which has become what it is to run: the name of its module."""
    running: dict[
        int, tuple[int, socket.socket]
    ] = {}  # by the descriptor that can be read once it has ended: pid, status
    while True:
        for ready in select.select([orders, *running], [], [])[0]:
            if ready is not orders:
                pid, status = running.pop(ready)
                os.close(ready)
                with status, contextlib.suppress(BrokenPipeError):
                    status.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                continue
            data, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 4)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                for number, descriptor in enumerate(descriptors[:3]):
                    os.dup2(descriptor, number)
                for descriptor in (*descriptors, *running):
                    os.close(descriptor)
                for _, status in running.values():
                    status.close()
                orders.close()
                order = json.loads(data)
                os.chdir(order["cwd"])
                os.environ.clear()
                os.environ.update(order["environment"])
                sys.argv = [order["module"], *order["args"]]
                return str(order["module"])
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = pid, socket.socket(fileno=descriptors[3])
            orders.send(str(pid).encode())


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    program = _fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(program, run_name="__main__", alter_sys=True)
