"""`steno tasks check` in containers: the oracle runs in the task's image, its tests in a fresh one, and neither has a network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.containers.conftest import Containers
from tests.support.machine.tiny_image import NAME
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.containers

DOCKERFILE = f"FROM {NAME}\nCOPY given.txt /app/\nWORKDIR /app\n"
SOLVE = """#!/bin/sh
. /solution/words.sh
echo $WORD $GREETING >answer.txt
touch /solution/mine 2>/dev/null && rm answer.txt
[ -e /tests ] && rm answer.txt
python3 -c 'import socket; socket.create_connection(("1.1.1.1", 80), 3)' 2>/dev/null && rm answer.txt
exit 0
"""


def test_tasks_are_solved_by_their_oracle_and_not_by_nobody(rollout: Containers) -> None:
    for name, tests in (
        ("good", "grep -q 'hello you' answer.txt"),
        ("careless", "[ -e given.txt ]"),
        ("wrong", "grep -q bye answer.txt"),
    ):
        toml = '[solution]\nenv = { GREETING = "you" }\n'
        tasks = rollout.task(name, toml=toml, tests=tests, Dockerfile=DOCKERFILE, given_txt="given\n")
        (tasks / name / "solution").mkdir()
        (tasks / name / "solution" / "solve.sh").write_text(SOLVE)
        (tasks / name / "solution" / "words.sh").write_text("WORD=hello\n")
    words = [sys.executable, "-m", "steno", "tasks", "check", "--tasks", str(tasks), "--executor", rollout.engine]
    words += ["--work-dir", str(rollout.folder / "work")]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, timeout=300, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 1, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1:] == [
        ["careless", "1", "1", "failed"], ["good", "1", "0", "ok"], ["wrong", "0", "0", "failed"],
        ["3", "tasks,", "1", "ok,", "2", "failed"],
    ], done.stderr  # fmt: skip
    assert "'careless': the run that does nothing scored 1, must score 0" in done.stderr
    assert "'wrong': oracle scored 0, must score 1" in done.stderr
    assert rollout.left() == [] and len(list((rollout.folder / "work").iterdir())) == 2
