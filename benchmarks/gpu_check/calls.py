"""Processes of the check: each gets a job and says what it found in a file, within its time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.sources import ROOT, SOURCES

LEAST_S = 5.0
"""With less time left, nothing is begun."""
EACH_S, REHEARSED_S = 180.0, 540.0
"""That one process may take. A rehearsal may run on a machine that is full of other work."""
POLL_S = 0.05
"""Between two looks at the processes."""
LINES = 12
"""Of what a failed process said last."""


class Failed(Exception):
    """A process ended without an answer; says why."""


class OutOfTime(Failed):
    """It was not begun."""


class Calls:
    """until: of time.monotonic, when all must have ended. small: one thread per process, and no GPU."""

    def __init__(self, folder: Path, *, until: float, small: bool) -> None:
        self.folder, self._until, self._small = folder, until, small
        self._each_s = REHEARSED_S if small else EACH_S
        self._count = 0

    def __call__(
        self,
        module: str,
        job: dict[str, Any],
        *,
        limit_s: float | None = None,
        python: str = sys.executable,
        ranks: int = 1,
    ) -> dict[str, Any]:
        """Run `benchmarks.gpu_check.<module>`; what its first rank found.

        Args: job: JSON; `out` is added, the file for what is found. ranks: more than one: as torchrun starts them.
        Raises: Failed: with the last lines of what it said. OutOfTime.
        """
        limit_s = min(self._each_s if limit_s is None else limit_s, self._until - time.monotonic())
        if limit_s < LEAST_S:
            raise OutOfTime(f"{module} was not begun: the time of the whole check was over")
        self._count += 1
        name = f"{self._count}-{module}"
        out, given = self.folder / f"{name}.json", self.folder / f"{name}-job.json"
        given.write_text(json.dumps({**job, "out": str(out)}))
        command = [python, "-m", f"benchmarks.gpu_check.{module}", str(given)]
        self._run(module, command, self.folder / f"{name}.log", ranks, limit_s)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def _run(self, module: str, command: list[str], log: Path, ranks: int, limit_s: float) -> None:
        started = time.monotonic()
        children: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("wb") as said:
                environments = self._environments(ranks)
                for environment in environments:
                    child = subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                        start_new_session=True,
                    )  # fmt: skip
                    children.append(child)
                # All are looked at: one that waits for another that has failed would wait until the time is over.
                while True:
                    codes = [child.poll() for child in children]
                    if any(codes) or None not in codes:
                        break
                    if time.monotonic() - started > limit_s:
                        raise Failed(f"{module} took longer than {limit_s:.0f} s\n{_last(log)}")
                    time.sleep(POLL_S)
        finally:
            for child in children:
                _end(child)
        if failed := next(filter(None, codes), None):
            raise Failed(f"{module} ended with {failed}\n{_last(log)}")

    def _environments(self, ranks: int) -> list[dict[str, str]]:
        """Of each rank. Nothing is fetched, whatever a library would like to."""
        common = {**os.environ, "PYTHONPATH": SOURCES, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self._small:
            common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if ranks == 1:
            return [common]
        port = str(_free_port())
        launched = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return [{**common, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _end(child: subprocess.Popen[bytes]) -> None:
    """The process, and what it started: its session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])


def _free_port() -> int:
    """Not that of the tests, which needs ports below those of outgoing connections: some machines have none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def job_of_this_process() -> dict[str, Any]:
    """What `Calls` gave."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def answer(job: dict[str, Any], found: dict[str, Any]) -> None:
    """What the process found; once, at its end."""
    Path(job["out"]).write_text(json.dumps(found))
