"""The trainer's launcher before it has ranks. After that: tests/integration/helm/test_nodes.py, test_rendezvous.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.sources import ROOT, SOURCES


def test_a_launcher_that_is_told_to_stop_while_it_imports_torch_stops(tmp_path: Path) -> None:
    """By a handler: as process 1 of a container it would not hear of a signal without one."""
    (tmp_path / "torch.py").write_text('import time\nprint("imports", flush=True)\ntime.sleep(600)\n')
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}"}
    command = [sys.executable, "-m", "steno_cli.torchrun", "-m", "steno", "train"]
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None and launcher.stdout.readline() == "imports\n"
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(300) == 143
        finally:
            launcher.kill()
