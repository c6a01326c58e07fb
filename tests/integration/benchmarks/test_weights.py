"""The benchmark of policy updates works; how fast is not asked, what travels is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_both_transports_are_measured_and_a_stream_uploads_the_model_once(tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    kinds = ["filesystem", "filesystem-delta", "stream", "stream-delta"]
    command = [sys.executable, "-m", "benchmarks.weights", "--layers", "1", "--updates", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert list(report["transports"]) == kinds and report["machine"]["cpus"]
    for kind, result in report["transports"].items():
        [one] = result["rounds"]
        assert 0 < one["pause_s"] < one["whole_s"] and one["bytes"] > 10_000_000
        assert one["sent_bytes"] < one["bytes"] / 2 if kind.endswith("-delta") else one["sent_bytes"] == one["bytes"]
        assert one["uploaded_bytes"] == (one["sent_bytes"] if kind.startswith("stream") else 0)
    assert "generation stands still" in done.stdout
