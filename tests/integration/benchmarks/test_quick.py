"""Every benchmark case works, on Steno in memory and with Redis, and on a whole worker; how fast is not asked here."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cases import worked
from benchmarks.run import OWN
from steno_rollouts.trials.proc import stat_of

ROOT = Path(__file__).resolve().parents[3]
STENO = ("steno", "steno_redis", "steno_scripted")


@pytest.mark.timeout(1800)
def test_every_case_works_and_says_what_it_was_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "benchmarks.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--targets", ",".join(STENO), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert {target: set(cases) for target, cases in report["results"].items()} == {
        name: set(OWN[name]) for name in STENO
    }
    assert all(worked(result) for cases in report["results"].values() for result in cases.values())
    assert {"bytes_per_token", "bytes_per_turn"} <= set(report["results"]["steno_redis"]["sessions"])
    assert {"cpu", "cores", "python", "revision", "date"} <= set(report["machine"])
    assert report["sizes"]["turns"] > 1
    assert "2,000 silent streams: memory" in done.stdout


def test_a_run_that_is_told_to_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "--targets", "steno", "--cases", "tiny", "--seconds", "30"]
    with subprocess.Popen([*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        # A benchmark that is told in the middle of starting its load knows of none.
        while not _loads(children := _children(run.pid)) or stat_of(run.pid)[0] != "S":
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _loads(children: dict[int, str]) -> bool:
    return any("benchmarks.load" in words for words in children.values())


def _children(pid: int) -> dict[int, str]:
    """Every process below this one, with its command line."""
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended before this, or while it was read
            if parent != pid:
                found[parent] = Path(f"/proc/{parent}/cmdline").read_text()
            todo += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found
