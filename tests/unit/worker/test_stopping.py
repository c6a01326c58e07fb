"""A worker that is told to stop before its engine is up."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WORKER = """
import asyncio, sys, time
from types import SimpleNamespace
from steno_worker import main
from steno_worker.config import WorkerSettings

async def load() -> None:
    print("loads", flush=True)
    time.sleep(600) if sys.argv[1] == "blocks" else await asyncio.sleep(600)

main.build_engine = lambda settings: SimpleNamespace(start=load)
sys.exit(main.main(WorkerSettings()))
"""


@pytest.mark.parametrize("how", ["blocks", "waits"])
def test_a_worker_that_is_told_to_stop_while_its_model_loads_stops(how: str) -> None:
    """By a handler: as process 1 of a container it would not hear of a signal without one."""
    with subprocess.Popen([sys.executable, "-c", WORKER, how], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == "loads\n"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            worker.kill()
