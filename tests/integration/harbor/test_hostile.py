"""What an agent can do to its reward, with Harbor: nothing where its verifier has a sandbox of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harbor.conftest import HERE, SHELL, Harbor, Sessions

pytestmark = pytest.mark.harbor

SECRET = "a-secret-of-the-launcher"
NAIVE = """#!/bin/bash
set -e
python3 -c 'print(6 * 7)' >/tmp/said
grep -q 42 /tmp/said
if grep -q solved /app/answer.txt; then r=1; else r=0; fi
printf '{"reward": %s}' $r >/logs/verifier/reward.json
"""
"""It trusts the sandbox that it runs in."""
STEAL = f"python3 /opt/task/thief.py {SECRET[:-3]} && sleep 1\n"


def said_by(row: dict[str, Any], name: str = "agent/said.txt") -> dict[str, Any]:
    (path,) = Path(row["folder"]).glob(f"harbor/*/{name}")
    return dict(json.loads(path.read_text()))


def test_a_thief_wins_nothing_where_its_verifier_has_a_sandbox_of_its_own(rollout: Harbor, sessions: Sessions) -> None:
    """Also between the steps of a task, while its daemons run."""
    thief = {"environment/thief.py": (HERE / "thief.py").read_text()}
    rollout.task("one", 'artifacts = ["/app/answer.txt"]\n', {"instruction.md": STEAL, "tests/test.sh": NAIVE, **thief})
    steps = 'artifacts = ["/app/answer.txt"]\n[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n'
    instructions = {"steps/first/instruction.md": STEAL, "steps/second/instruction.md": "true\n"}
    tasks = rollout.task("two", steps, {**instructions, "tests/test.sh": NAIVE, **thief})
    rollout.environment = {"SECRET": SECRET, "OPENAI_API_KEY": SECRET, "STENO_ADMIN_KEY": SECRET}
    said = rollout(tasks, "--run", "thief", "--agent", SHELL, "--group-size", "1", command=[])
    rows = {row["task_id"]: row for row in rollout.rows()}
    assert {name: row["reward"] for name, row in rows.items()} == {"one": 0.0, "two": 0.0}, said
    assert {name: row["metrics"].get("shared_verifier") for name, row in rows.items()} == {"one": None, "two": None}
    assert (rows["two"]["metrics"]["step/first/reward"], rows["two"]["metrics"]["step/second/reward"]) == (0.0, 0.0)
    for seen in (said_by(rows["one"]), said_by(rows["two"], "steps/first/agent/said.txt")):
        seen.pop("internet")  # as this machine has it: docs/harbor.md
        assert seen == {
            "own": 200, "reward": True, "control": [403, 403, 403], "post": 403, "other": 403, "environment": [], "processes": [],
        }  # fmt: skip
    assert {session.reward for session in sessions("thief").values()} == {0.0}
    assert rollout.left() == [] and os.environ.get("SECRET") is None
