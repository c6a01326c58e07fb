"""Ranks as processes: started by a launcher, as users start them, or forked from one process that has imported all they need.

Imports take a rank longer than the work of most tests. A forked rank has them; all else is its own: process, process groups,
engine, random numbers. So a case is played alone as it is in company, and one that dies takes none with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.ports import free_port
from tests.support.processes import SLOW_S

RANK = "tests.integration.trainer.rank"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
_IMPORTS = "tests.integration.trainer.imports"


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
def forked(count: int, module: str, folder: Path) -> Iterator[list[ForkServerProcess]]:
    """`module.main(FOLDER)` in `count` processes that are told what torchrun tells its own, or in one plain process. What they
    print is in FOLDER/said. Leaving the block kills them."""
    context, ranks = _forks(), []
    (folder / "said").touch()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        for rank in range(count):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment = meeting | {name: str(value) for name, value in told.items()} if count > 1 else {}
            ranks.append(context.Process(target=_be_rank, args=(module, folder, environment), daemon=True))
            ranks[-1].start()
        yield ranks
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def fork(count: int, module: str, folder: Path) -> None:
    """To the end of all, or of the first that fails, and then of the others. Fails with what they said."""
    deadline = time.monotonic() + SLOW_S
    with forked(count, module, folder) as ranks:
        while None in (ended := [process.exitcode for process in ranks]) and not any(ended):
            assert time.monotonic() < deadline, f"ranks ended with {ended}\n{(folder / 'said').read_text()}"
            # By what was seen above: one that ended since then must end this wait, too.
            running = [process.sentinel for process, code in zip(ranks, ended, strict=True) if code is None]
            connection.wait(running, deadline - time.monotonic())
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


def _forks() -> Any:
    """Started by the first test that asks; it ends with pytest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_IMPORTS])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_ENVIRONMENT, "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def _be_rank(module: str, folder: Path, environment: dict[str, str]) -> None:
    said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(environment)
    importlib.import_module(_IMPORTS)  # it is there; where it failed, this says why
    importlib.import_module(module).main(folder)
