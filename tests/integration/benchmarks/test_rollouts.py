"""The benchmark of rollouts works, with processes and with trials that wait in flight; how fast is not asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rollouts import CASES, Bench, Case, table
from benchmarks.rollouts_stack import NULL, stack, upstream
from benchmarks.targets import free_port

ROOT = Path(__file__).resolve().parents[3]


def test_processes_are_measured_and_trials_that_wait(tmp_path: Path) -> None:
    out, names = tmp_path / "rollouts.json", ["local", "unconfined", "hundred"]
    command = [sys.executable, "-m", "benchmarks.rollouts", "--share", "0.02", "--cases", ",".join(names)]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report == json.loads(done.stdout.splitlines()[-1]) and table(report["results"]) in done.stdout
    assert {name: found["trials"] for name, found in report["results"].items()} == {
        "local": 16,
        "unconfined": 16,
        "hundred": 4,
    }
    for found in report["results"].values():
        assert found["started_per_minute"] > 0
        assert found["launcher_cpu_ms_per_trial"] <= found["with_children_cpu_ms_per_trial"]
    # Its trials wait until all have begun. Another case's launcher may have ended before it was looked at.
    held = report["results"]["hundred"]
    assert held["launcher_rss_bytes"] > 10 * 2**20
    assert held["launcher_cpu_ms_per_trial"] > 0 and held["proxy_cpu_ms_per_trial"] > 0
    assert {"cpu", "cores", "date"} <= set(report["machine"])
    assert (CASES["hundred"].in_flight, CASES["thousand"].in_flight) == (100, 1000)


def test_a_case_whose_trials_fail_is_no_measurement(tmp_path: Path) -> None:
    """Here by a turn limit of one."""
    with stack(tmp_path) as running, pytest.raises(RuntimeError, match="two turns"):
        Bench(running, tmp_path).run("failing", Case(4, 4, options=("--max-turns", "1", "--confine", "off")))


def test_a_null_trial_comes_to_its_end_on_the_engine_that_others_are_measured_over(tmp_path: Path) -> None:
    """It reads each answer until the connection ends, as it asks for."""
    port = free_port()
    url = {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "none", "STENO_TASK_GATE": ""}
    with upstream(tmp_path, "127.0.0.1", port):
        subprocess.run(["bash", NULL], cwd=tmp_path, env={**os.environ, **url}, check=True, timeout=60)
    assert (tmp_path / "reward.txt").read_text() == "1\n"
