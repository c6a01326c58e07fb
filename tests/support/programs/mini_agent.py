"""mini-swe-agent from PyPI, unmodified: imported once, and forked for each run, since its import takes seconds of a processor.

`AGENTS/bin/python tests/support/programs/mini_agent.py serve SOCKET` is the server, in the agent's own environment; `run SOCKET
ARGUMENT…` is the command `mini` in its place, in the folder and with the environment of whoever calls it. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Read when it is imported: no questions, no prices from the network."""
PR_SET_PDEATHSIG = 1
_open: set[socket.socket] = set()
"""Of runs that this process waits for."""


@contextlib.contextmanager
def mini_server(python: Path) -> Iterator[Path]:
    """Args: python: of the environment that has mini-swe-agent. Returns: the socket of a server, which may not listen yet."""
    with tempfile.TemporaryDirectory(prefix="mini-") as folder:
        address, log = Path(folder) / "socket", Path(folder) / "log"
        environment = {**os.environ, **SETTINGS, "HOME": folder, "PYTHONPATH": ""}
        with log.open("wb") as out:
            child = subprocess.Popen(
                [str(python), __file__, "serve", str(address)], env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out,
            )  # fmt: skip
        try:
            yield address
            assert child.poll() is None, f"mini-swe-agent's server ended with {child.returncode}: {log.read_text()}"
        finally:
            child.kill()
            child.wait()


def run_mini(
    address: Path,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    within_s: float = 400,
) -> int:
    """One run. Returns: its exit code. It is killed when this is. Args: within_s: for the server to listen, and then for the run.
    Raises: RuntimeError: it was killed, or took longer; OSError: no server."""
    job = {
        "arguments": list(arguments),
        "folder": str(folder),
        "environment": dict(environment),
        "log": str(log),
    }
    with _connected(address, within_s) as connection:
        _open.add(connection)
        connection.settimeout(within_s)
        try:
            connection.sendall(json.dumps(job).encode() + b"\n")
            said = connection.makefile().read()
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # which ends the run
            raise RuntimeError(f"mini-swe-agent took longer than {within_s:g} s: {_last_of(log)}") from None
        finally:
            _open.discard(connection)
    if not said:
        raise RuntimeError(f"mini-swe-agent was killed: {_last_of(log)}")
    return int(said)


def _last_of(log: Path) -> str:
    return log.read_text()[-2000:] if log.exists() else ""


def end_runs() -> None:
    """Kill the runs that this process waits for, in other threads."""
    for connection in list(_open):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connected(address: Path, within_s: float) -> socket.socket:
    """Once the server listens: it makes its socket when all is imported."""
    wait = threading.Event()
    for _ in range(round(within_s / 0.05)):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            wait.wait(0.05)
        else:
            return connection
    raise TimeoutError(f"{address}: nobody listens after {within_s:.0f} s")


def serve(address: str) -> None:
    """Until it is killed, or whoever started it is gone."""
    from minisweagent.models.litellm_model import LitellmModel  # noqa: F401  # with litellm, which takes the time
    from minisweagent.run.mini import app

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the runs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run(connection, app)
            connection.close()


def _run(connection: socket.socket, app: Any) -> None:
    """In the process of its own. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = json.loads(connection.makefile().readline())
        out = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"] | SETTINGS)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        sys.argv = ["mini", *job["arguments"]]
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # os._exit would lose it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            connection.sendall(str(code).encode())
        os._exit(code)


def _end_with(connection: socket.socket) -> None:
    """Kill this run, and what it started, when its caller is gone."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    what, address, *arguments = sys.argv[1:]
    if what == "serve":
        serve(address)
    folder = Path.cwd()
    sys.exit(run_mini(Path(address), arguments, folder, os.environ, folder / "mini.log"))


if __name__ == "__main__":
    main()
