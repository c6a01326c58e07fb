"""`steno tasks check` as its users run it, on processes of this machine: no proxy is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.programs import forked
from tests.support.programs.stack import ROOT

REWARD = """
def said(task, transcript, exit_code):
    if task["id"] == "careless":
        return 1
    if task["id"] == "asks":
        return transcript.session.reward
    return float(transcript.last_reply == task["_answer"] and not transcript.turns)
"""


def check(tasks: Path, *options: str, oracle: tuple[str, ...] = (), code: int = 0, **variables: str) -> tuple[str, str]:
    """What it printed, and what it said on stderr."""
    work = ["--work-dir", str(tasks.parent / "work"), "--in-flight", "2"]
    words = [sys.executable, "-m", "steno", "tasks", "check", "--tasks", str(tasks), *work, *options]
    done = forked.run([*words, *(("--", *oracle) if oracle else ())], {"COLUMNS": "200", **variables})
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def rows(path: Path, *names: str) -> Path:
    path.write_text("".join(json.dumps({"id": name, "_answer": f"answer of {name}"}) + "\n" for name in names))
    return path


def folder(tasks: Path, name: str, solve: str | None, toml: str = "") -> None:
    (tasks / name / "environment").mkdir(parents=True)
    (tasks / name / "environment" / "reward.sh").write_text("echo 1 > reward.txt\n")
    (tasks / name / "task.toml").write_text(toml)
    (tasks / name / "instruction.md").touch()
    if solve is not None:
        (tasks / name / "solution").mkdir()
        (tasks / name / "solution" / "solve.sh").write_text(f"#!/bin/sh\n{solve}\n")


def test_rows_are_solved_by_a_command_that_is_told_all(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(REWARD)
    scored = ("--reward", f"{tmp_path / 'score.py'}:said")
    out, _ = check(rows(tmp_path / "good.jsonl", "a", "b"), *scored, oracle=("echo", "{_answer}"))
    assert [line.split() for line in out.splitlines()] == [
        ["task", "oracle", "nobody"], ["a", "1", "0", "ok"], ["b", "1", "0", "ok"], ["2", "tasks,", "2", "ok,", "0", "failed"],
    ]  # fmt: skip
    tasks = rows(tmp_path / "bad.jsonl", "a", "careless", "asks")
    out, said = check(tasks, *scored, oracle=("echo", "{_answer}"), code=1)
    assert "careless 1 1 failed" in " ".join(out.split()) and "3 tasks, 1 ok, 2 failed" in out
    assert "'careless' (line 2): the run that does nothing scored 1, must score 0" in said
    assert "'asks' (line 3): oracle has no reward, must score 1: " in said and "no proxy is asked" in said
    out, said = check(tasks, *scored, "--filter", "a", oracle=("sh", "-c", "echo {_answer}; echo oops >&2; exit 3"))
    assert "1 task, 1 ok, 0 failed" in out
    _, said = check(tasks, *scored, oracle=("echo", "{_gold}"), code=2)
    assert "{_gold}: task 'a' (line 1) has no such field" in said


def test_folders_are_solved_by_their_own_solution(tmp_path: Path) -> None:
    """Also: what is missing is named, and only what failed is kept."""
    tasks = tmp_path / "tasks"
    folder(
        tasks, "solved", 'sh reward.sh; [ "$HINT" = x ] || rm reward.txt', '[solution]\nenv = { HINT = "${MY_HINT}" }\n'
    )
    folder(tasks, "unsolvable", None)
    folder(tasks, "broken", "echo no such thing >&2; exit 4")
    folder(tasks, "slow", "sleep 60", "[agent]\ntimeout_sec = 0.5\n")
    out, said = check(tasks, "--only", "oracle", code=1, MY_HINT="x")
    assert "4 tasks, 1 ok, 3 failed" in out and "nobody" not in out
    assert "'unsolvable': oracle has no reward, must score 1: no oracle: the task has no solution/solve.sh" in said
    assert "'broken': oracle has no reward, must score 1: exit code 4: no such thing (see " in said
    assert "'slow': oracle has no reward, must score 1: ended after 0.5 s" in said
    kept = sorted((tmp_path / "work").iterdir())
    assert len(kept) == 2 and all((folder / "stderr.log").exists() for folder in kept)
    _, said = check(tasks, "--only", "oracle", "--filter", "solved", code=1)
    assert "solution.env: HINT is ${MY_HINT}, and MY_HINT is not set" in said
    _, said = check(tasks, "--only", "nobody", "--filter", "solved", code=1)
    assert "the run that does nothing has no reward, must score 0: no reward.json and no reward.txt" in said


def test_ctrl_c_ends_what_runs(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    folder(tasks, "slow", f"echo $$ >{tmp_path}/pid; sleep 600")
    words = [
        sys.executable,
        "-m",
        "steno",
        "tasks",
        "check",
        "--tasks",
        str(tasks),
        "--work-dir",
        str(tmp_path / "work"),
    ]
    with subprocess.Popen([*words, "--only", "oracle"], cwd=ROOT, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 180
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=180)
    assert process.returncode == 130
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
