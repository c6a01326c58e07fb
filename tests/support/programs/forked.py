"""`python -m steno ...` as a fork of a process that has imported what it imports.

Starting a worker takes seconds of processor time for torch's imports alone, and tests start hundreds of programs. The program is
a process of its own all the same, with its own pid, environment, folder and exit code: `steno/__main__.py` runs in it from its
first line to its last, and the interpreter ends as ever. That a fresh interpreter finds all it needs is played where the lines of
the documentation are (tests/integration/face/test_documented.py), by the command line's own tests, the demos and the images.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
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
import time
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
_VLLM = (
    "steno_cli.main",
    "steno_cli.commands.serve",
    "steno_cli.terminal.flags",
    "steno_worker.main",
    "steno_worker.engines.vllm.engine",
    "tests.support.programs.forked_engines",
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
RANKS = ("steno_cli.torchrun", "tests.support.programs.forked_ranks")
"""For torchrun and its ranks."""
_COMMANDS = ("doctor", "env", "groups", "rollout", "runs", "sessions", "tasks")
_LITELLM = (*_PROXY, "steno_cli.commands.upstream", "steno_worker.engines.litellm.text", "uvloop")
_READ_LATER = ("STENO_", "XDG_DATA_HOME", "PYTEST_", "PYTHONUNBUFFERED", "COLUMNS")
"""Beginnings of variables that no import reads: a program's may differ from those of the process that forks."""
_SET_MEANWHILE = (
    "LITELLM_LOCAL_MODEL_COST_MAP", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_",  # imports of litellm, DeepSpeed, torch
    "LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_", "VLLM_",  # vLLM, which makes an engine
)  # fmt: skip
"""Beginnings of variables that libraries set in a test's process. They may differ too: the process that forks has those that its
own imports set."""
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
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Program | subprocess.Popen[bytes]


class _Forker:
    """A process that has imported `modules` and forks on demand: one for all processes of pytest, and it ends with them."""

    def __init__(self, modules: Sequence[str]) -> None:
        while (found := _connected(address(_run, modules))) is None:
            self._listen(_run, modules)
        self._socket = found

    @staticmethod
    def _listen(run: int, modules: Sequence[str]) -> None:
        """Start the process, unless another one of this run's does. Whoever connects waits for its imports."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address(run, modules))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.01)  # it was bound since, and is not listened at yet
                return
            listener.listen(64)
            environment = {**IMPORTED_IN, "PYTHONUNBUFFERED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            if modules == RANKS:
                environment |= _CPU
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.programs.forked", str(listener.fileno()), str(run), *modules],
                pass_fds=[listener.fileno()],
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
        assert pid, "the process that forks is gone; what it said stands above"
        return Program(args, int(pid), status)


def address(run: int, modules: Sequence[str]) -> str:
    """Of the socket of what forks. It is no file: it is gone with its last descriptor."""
    return f"\0steno-tests-{run}-{hashlib.sha256(' '.join(modules).encode()).hexdigest()[:16]}"


def _connected(address: str) -> socket.socket | None:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.connect(address)
    except ConnectionRefusedError:
        found.close()
        return None
    return found


_forkers: dict[tuple[str, ...], _Forker] = {}
IMPORTED_IN = dict(os.environ)
"""The environment in which the processes that fork import. It is taken again once all tests are collected: what tests import sets
variables too (vLLM sets a dozen)."""


_run = os.getpid()
"""When this process ends, the processes that fork end: xdist's controller, or this process."""


def tests_are_collected() -> None:
    """Called in each process of pytest. Programs of tests that use this module are runs of their own."""
    global _run
    IMPORTED_IN.clear()
    IMPORTED_IN.update(os.environ)
    _run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, cwd: Path = ROOT, timeout: float = 300
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
    """Start a program, with its stdout in `out`, its stderr in `err` (None: in `out` too), and an empty stdin. A command of this
    Python's `-m steno` that tests start often is a fork, and so is torchrun on CPUs; any other is a new process."""
    err = err or out
    modules = _modules(command)
    imported_in = {**IMPORTED_IN, "CUDA_VISIBLE_DEVICES": ""} if modules == RANKS else IMPORTED_IN
    changed = {name for name in {*environment, *imported_in} if environment.get(name) != imported_in.get(name)}
    if modules is None or any(not name.startswith(_READ_LATER + _SET_MEANWHILE) for name in changed):
        return subprocess.Popen(
            command, cwd=cwd, env=dict(environment), stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
    return fork(modules, command, environment, cwd, out, err)


def fork(
    modules: tuple[str, ...],
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    out: IO[bytes],
    err: IO[bytes],
) -> Program:
    """`python -m MODULE ARGUMENT...` as a fork of a process that has imported `modules`, whatever is in its environment."""
    if modules not in _forkers:
        _forkers[modules] = _Forker(modules)
    return _forkers[modules].start(list(command), environment, cwd, out, err)


def _modules(command: Sequence[str]) -> tuple[str, ...] | None:
    if list(command[:3]) == [sys.executable, "-m", "steno_cli.torchrun"]:
        return RANKS
    if list(command[:3]) != [sys.executable, "-m", "steno"]:
        return None
    words = set(command[4:])
    match command[3]:
        case "proxy":
            return _LITELLM if "--upstream" in words else _PROXY
        case "worker" if "litellm" not in words:  # with no word about it, the engine is transformers
            return _VLLM if "vllm" in words else _WORKER
        case name if name in _COMMANDS:
            return _COMMAND
    return None


def _fork_on_demand(listener: socket.socket, run: int) -> str:
    """Until the run has ended. Returns in each fork, which has become what it is to run: the name of its module."""
    run_ended = os.pidfd_open(run)
    clients: list[socket.socket] = []
    running: dict[int, tuple[int, socket.socket]] = {}  # by what can be read once it has ended: pid, status
    while True:
        for ready in select.select([run_ended, listener, *clients, *running], [], [])[0]:
            if ready == run_ended:
                os._exit(0)
            elif ready is listener:
                clients.append(listener.accept()[0])
            elif isinstance(ready, socket.socket):
                data, descriptors, _, _ = socket.recv_fds(ready, 1 << 20, 4)
                if not data:
                    clients.remove(ready)
                    ready.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for number, descriptor in enumerate(descriptors[:3]):
                        os.dup2(descriptor, number)
                    for descriptor in (*descriptors, *running, run_ended):
                        os.close(descriptor)
                    for one in (listener, *clients, *(status for _, status in running.values())):
                        one.close()
                    order = json.loads(data)
                    os.chdir(order["cwd"])
                    os.environ.clear()
                    os.environ.update(order["environment"])
                    sys.argv = [order["module"], *order["args"]]
                    return str(order["module"])
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                running[os.pidfd_open(pid)] = pid, socket.socket(fileno=descriptors[3])
                ready.send(str(pid).encode())
            else:
                pid, status = running.pop(ready)
                os.close(ready)
                with status, contextlib.suppress(BrokenPipeError):
                    status.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    program = _fork_on_demand(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    runpy.run_module(program, run_name="__main__", alter_sys=True)
