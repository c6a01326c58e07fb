"""What an agent can do to its reward, with Harbor: nothing where its verifier has a sandbox of its own; where it has not, what
docs/harbor.md says of each attack."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harbor.conftest import PROGRAMS, SHELL, Harbor
from tests.support.machine.far_host import PORT

pytestmark = pytest.mark.harbor

SECRET = "a-secret-of-the-launcher"
NAIVE = """#!/bin/bash
python3 -c 'print("right" if open("/app/answer.txt").read() == "42" else "wrong")' >/tmp/said
if grep -q right /tmp/said; then r=1; else r=0; fi
printf '{"reward": %s}' $r >/logs/verifier/reward.json
sleep 0.3
if [ -e /opt/kept/bin/cat ]; then
  for _ in {1..300}; do [[ $(</logs/verifier/reward.json) = *1.0* ]] && break; sleep 0.1; done
fi
"""
"""It trusts the sandbox that it runs in, and leaves time for what still lives there: much where `cat` is the thief's, so that
nothing finds its daemon."""
THIEF = {"environment/thief.py": (PROGRAMS / "thief.py").read_text(), "tests/test.sh": NAIVE}
APART = 'artifacts = ["/app/answer.txt"]\n'
SHARED = '[verifier]\nenvironment_mode = "shared"\n'
INSIDE = ("quiet", "path", "python", "site", "grep", "listing")
"""Steps of a task whose verifier runs where the agent did, each with an attack."""
UNDO = (
    "rm -f /usr/local/sbin/python3 /usr/local/lib/python3.*/site-packages/sitecustomize.py; "
    "[ ! -d /opt/kept ] || cp -a /opt/kept/. /; "
)


def steals(far: str, *attacks: str) -> str:
    return f"python3 /opt/task/thief.py {SECRET[:-3]} {far}:{PORT} {' '.join(attacks)}\n"


def said_by(row: dict[str, Any], name: str = "agent/said.txt") -> dict[str, Any]:
    (path,) = Path(row["folder"]).glob(f"harbor/*/{name}")
    return dict(json.loads(path.read_text()))


def steps(*names: str) -> str:
    return "".join(f'[[steps]]\nname = "{name}"\n' for name in names)


def test_a_thief_wins_nothing_where_its_verifier_has_a_sandbox_of_its_own(rollout: Harbor, far: str) -> None:
    """Also between the steps of a task, while its daemons run. In a sandbox that it shares with its verifier some attacks win."""
    everything = steals(far, "asks", "file", "daemon", "tests", "site", "path", "shell", "grep", "python")
    rollout.task("one", APART, {"instruction.md": everything, **THIEF})
    instructions = {"steps/first/instruction.md": everything, "steps/second/instruction.md": "true\n"}
    rollout.task("two", APART + steps("first", "second"), {**instructions, **THIEF})
    rollout.task("linked", SHARED, {"instruction.md": steals(far, "tests"), **THIEF})
    attacks = {name: steals(far, name) for name in INSIDE} | {"quiet": steals(far, "asks", "file", "daemon", "shell")}
    instructions = {f"steps/{name}/instruction.md": UNDO + attack for name, attack in attacks.items()}
    tasks = rollout.task("inside", SHARED + steps(*INSIDE), {**instructions, **THIEF})
    rollout.environment = {"SECRET": SECRET, "OPENAI_API_KEY": SECRET, "STENO_ADMIN_KEY": SECRET}
    said = rollout(tasks, "--run", "thief", "--agent", SHELL, "--group-size", "1", command=[])
    rows = {row["task_id"]: row for row in rollout.rows()}
    wanted = {"one": (0.0, None), "two": (0.0, None), "linked": (0.0, 1.0), "inside": (5 / 6, 1.0)}
    found = {name: (row["reward"], row["metrics"].get("shared_verifier")) for name, row in rows.items()}
    assert found == wanted, (said, rows)
    assert (rows["two"]["metrics"]["step/first/reward"], rows["two"]["metrics"]["step/second/reward"]) == (0.0, 0.0)
    for seen in (
        said_by(rows["one"]),
        said_by(rows["two"], "steps/first/agent/said.txt"),
        said_by(rows["inside"], "steps/quiet/agent/said.txt"),
    ):
        assert {name: value for name, value in seen.items() if name in ASKED} == ASKED
    won = {name: rows["inside"]["metrics"].get(f"step/{name}/reward") for name in INSIDE}
    assert won == {"quiet": 0.0, "path": 1.0, "python": 1.0, "site": 1.0, "grep": 1.0, "listing": 1.0}
    assert rollout.left() == [] and os.environ.get("SECRET") is None


ASKED = {
    "own": 200, "control": [403, 403, 403], "post": 403, "other": 403, "environment": [], "processes": [],
    "far": True,
}  # fmt: skip
"""What comes of the thief's questions. The address outside is reached: by itself, Harbor's network ends nowhere."""
