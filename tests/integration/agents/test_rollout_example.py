"""The example of deploy/, with the real mini-swe-agent against a scripted engine that repairs one task, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs.stack import ROOT, running

pytestmark = pytest.mark.agents

EXAMPLE = ROOT / "deploy/examples/qwen2.5-3b-mini-swe-agent"
SCRIPT = """
import json


def reply(request):
    done = sum(message["role"] == "tool" for message in request["messages"])
    asked = " ".join(str(message["content"]) for message in request["messages"] if message["role"] == "user")
    repaired = "def mean(values):\\\\n    return sum(values) / len(values) if values else 0.0\\\\n"
    repair = f"printf '{repaired}' > stats.py" if "stats.py" in asked else "ls"
    command = [repair, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][min(done, 1)]
    call = {"id": "", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
    return {"content": "Next.", "tool_calls": [call]}
"""


def test_its_agent_repairs_a_task_and_its_score_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = f"{Path(os.environ['STENO_AGENTS_VENV']) / 'bin'}:{os.environ['PATH']}"
    with running(tmp_path / "stack", ["--engine", "scripted", "--script", f"{script}:reply"]) as stack:
        done = subprocess.run(
            [
                sys.executable, "-m", "steno", "rollout", "--config", "rollout.yaml", "--proxy", stack.url,
                "--group-size", "1", "--in-flight", "2", "--epochs", "1", "--groups-per-step", "8",
                "--results", str(tmp_path / "results.jsonl"), "--work-dir", str(tmp_path / "trials"),
            ],
            cwd=EXAMPLE, env={**os.environ, "PATH": path},
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {row["task_id"]: row for row in rows}
    assert all(row["end_reason"] == "completed" and row["turns"] == 2 for row in rows), done.stderr
    assert (found["mean-of-nothing"]["reward"], found["mean-of-nothing"]["metrics"]["solved"]) == (1.0, 1.0)
    assert all(row["reward"] < 1.0 for name, row in found.items() if name != "mean-of-nothing")
