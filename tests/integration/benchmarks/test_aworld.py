"""The re-enacted cycle: what it counts against is right, and it runs. How fast is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.aworld import SEED, Sizes, Turn, batch, ideal_s, seconds, worked_out

ROOT = Path(__file__).resolve().parents[3]


def test_the_ideal_is_a_place_that_is_never_empty_while_a_trial_waits() -> None:
    trials = [[Turn(length, 0.0)] for length in (3.0, 1.0, 1.0, 2.0)]
    assert ideal_s(trials, 1) == 7.0 and ideal_s(trials, 2) == 4.0 and ideal_s(trials, 9) == 3.0


def test_a_batch_is_the_same_each_time_and_as_long_as_the_reports() -> None:
    trials = batch(Sizes(), SEED)
    assert trials == batch(Sizes(), SEED) and len(trials) == 64
    assert sum(map(seconds, trials)) == pytest.approx(76.95)


def test_what_is_worked_out_compares_with_the_report() -> None:
    found = worked_out(Sizes(), sequential_s=80.0, parallel_s=5.25, overlapped_s=4 * 5.25)
    assert found["speed_up"] == pytest.approx(80 / 5.25) and found["report_speed_up"] == pytest.approx(76.95 / 5.25)
    assert found["of_ideal"] == pytest.approx(found["speed_up"] / found["ideal_speed_up"])
    assert found["cycle_speed_up"] == pytest.approx(78.39 / 5.25)
    assert found["report_cycle_speed_up"] == pytest.approx(11.7, abs=0.05)


def test_it_runs_and_says_what_it_was_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "aworld.json"
    command = [sys.executable, "-m", "benchmarks.aworld", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert {"cpu", "revision", "date"} <= set(report["machine"]) and report["results"]["cycle_s"] > 0
    assert "speed-up of the cycle" in done.stdout
