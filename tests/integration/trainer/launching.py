"""Ranks as processes: started by a launcher, as users start them, or forked from one process that has imported all they need.

Imports take a rank longer than the work of most tests. A forked rank has them; all else is its own: process, process groups,
engine, random numbers. So a case is played alone as it is in company, and one that dies takes none with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.programs import forked
from tests.support.programs.ports import free_port
from tests.support.programs.processes import SLOW_S
from tests.support.sources import ROOT

RANK = "tests.integration.trainer.rank"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def start_ranks(count: int, module: str, *arguments: str, launcher: str = "torchrun") -> subprocess.Popen[str]:
    """`module` in `count` processes under a launcher, or one plain process. End it with `end`."""
    command = [sys.executable, "-m", module, *arguments]
    if launcher == "deepspeed":
        command = [
            str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(count), "--master_addr",
            "127.0.0.1", "--master_port", str(free_port()), "--no_local_rank", "--module", module, *arguments,
        ]  # fmt: skip
    elif count > 1:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-addr", "127.0.0.1",
            "--master-port", str(free_port()), "-m", module, *arguments,
        ]  # fmt: skip
    environment = {**os.environ, **_ENVIRONMENT}
    if launcher == "deepspeed":  # the launcher itself looks for devices, too
        environment |= {"DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill it and its ranks, at once: torchrun starts them in sessions of their own, and they outlive it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for started in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                started.kill()
    process.wait()


def launch(count: int, module: str, folder: Path, *, launcher: str = "torchrun") -> None:
    """`module FOLDER` in ranks of a launcher, or as one plain process, to its end. Fails with what they said."""
    process = start_ranks(count, module, str(folder), launcher=launcher)
    try:
        output, _ = process.communicate(timeout=SLOW_S)
    finally:
        end(process)
    assert process.returncode == 0, output


@contextlib.contextmanager
def running_ranks(count: int, module: str, folder: Path, *more: str) -> Iterator[list[forked.Program]]:
    """`module FOLDER MORE...` in `count` processes that are told what torchrun tells its own, or in one plain process. What they
    print is in FOLDER/said. Leaving the block kills them."""
    command, ranks = [sys.executable, "-m", module, str(folder), *more], []
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "said").open("ab") as said:
        try:
            for rank in range(count):
                told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                environment = meeting | {name: str(value) for name, value in told.items()} if count > 1 else {}
                environment = {**os.environ, **_ENVIRONMENT, "DS_ACCELERATOR": "cpu", **environment}
                ranks.append(forked.fork(forked.RANKS, command, environment, ROOT, said, said))
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def fork(count: int, module: str, folder: Path, *more: str) -> None:
    """To the end of all, or of the first that fails, and then of the others. Fails with what they said."""
    deadline = time.monotonic() + SLOW_S
    with running_ranks(count, module, folder, *more) as ranks:
        while None in (ended := [process.poll() for process in ranks]) and not any(ended):
            assert time.monotonic() < deadline, f"ranks ended with {ended}\n{(folder / 'said').read_text()}"
            time.sleep(0.02)
        until = time.monotonic() + 5.0  # one that failed because of another may have been seen first
        while None in ended and time.monotonic() < until:
            time.sleep(0.02)
            ended = [process.poll() for process in ranks]
    assert not any(ended), f"ranks ended with {ended}\n{(folder / 'said').read_text()}"


def run_ranks(count: int, job: dict[str, Any], folder: Path, *, launcher: str | None = None) -> Any:
    """Carry out a job (see `rank.py`) and return what the first rank saved. launcher: None forks the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    if launcher is None:
        fork(count, RANK, folder)
    else:
        launch(count, RANK, folder, launcher=launcher)
    return torch.load(folder / "result.pt", weights_only=False)
