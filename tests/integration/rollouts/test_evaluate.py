"""`steno evaluate` and `steno results`, as their users run them, on the model that the project ships."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from steno.models import TINY
from steno_rollouts.outcome import TrialResult

AGENT = """
import json, os, urllib.request
said = {"role": "user", "content": os.environ["STENO_TASK_INSTRUCTION"]}
body = json.dumps({"model": "m", "max_tokens": 4, "messages": [said]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).read()
open("reward.txt", "w").write(os.environ["STENO_TASK_WORTH"])
"""
WORKER_DIES = """
import psutil
[evaluation] = [each for each in psutil.Process().parents() if "evaluate" in each.cmdline()]
[worker] = [each for each in evaluation.children() if "worker" in each.cmdline()]
worker.kill()
worker.wait()
"""


def steno(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STENO_")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "steno", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_checkpoint_is_served_rolled_out_and_counted(tmp_path: Path) -> None:
    tasks = [
        {"task_id": "good", "instruction": "hello", "worth": "1"},
        {"task_id": "bad", "instruction": "hi", "worth": "0"},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "agent.py").write_text(AGENT)
    done = steno(
        "evaluate", "--model", str(TINY), "--engine", "transformers", "--tasks", "tasks.jsonl", "--group-size", "2",
        "--run", "first", "--results", "first.jsonl", "--confine", "off", "--", sys.executable, str(tmp_path / "agent.py"),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trials are not isolated: they can read your files" in done.stderr and "the admin key" not in done.stderr, (
        "its rollouts have the run's"
    )
    assert "2 tasks, 4 trials with a reward, 0 without" in done.stdout
    assert (
        "mean reward  0.500" in done.stdout
        and "pass@1       0.500" in done.stdout
        and "pass@2       0.500" in done.stdout
    )
    rows = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["turns"] == 1 and row["completion_tokens"] > 0 for row in rows)

    for row in rows:  # as if the policy had learned the one and forgotten nothing
        row["reward"] = 1.0
    (tmp_path / "second.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = steno("results", "first.jsonl", "second.jsonl", cwd=tmp_path)
    assert both.returncode == 0, both.stderr
    assert "second - first, paired by task: +0.500" in both.stdout and "1 tasks better, 0 worse, 1 equal" in both.stdout


def test_an_evaluation_whose_worker_has_died_is_none(tmp_path: Path) -> None:
    """Trials that were given a reward all the same say nothing of the model."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task_id": "good", "instruction": "hello", "worth": "1"}) + "\n")
    (tmp_path / "agent.py").write_text(AGENT + WORKER_DIES)
    done = steno(
        "evaluate", "--model", str(TINY), "--engine", "transformers", "--tasks", "tasks.jsonl", "--group-size", "1",
        "--confine", "off", "--", sys.executable, str(tmp_path / "agent.py"), cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "the worker ended with code -9" in done.stderr


def test_checkpoints_of_a_run_are_evaluated_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task_id": "good", "instruction": "hello", "worth": "1"}) + "\n")
    (tmp_path / "agent.py").write_text(AGENT)
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(TINY, folder / f"weights-ab-{step}")
        (folder / "state.msgpack").touch()
        os.utime(folder / "state.msgpack", (step, step))
    words = (
        "evaluate --follow checkpoints --until-step 4 --engine transformers --results kept --tasks tasks.jsonl".split()
    )
    words += ["--group-size", "2", "--confine", "off", "--", sys.executable, str(tmp_path / "agent.py")]
    done = steno(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(("step", "mean"))]
    mean = "mean reward  1.000"
    assert [line.split("(")[0].strip() for line in told] == ["step 4", mean, "step 2", mean]
    steps = [json.loads(line) for line in (tmp_path / "kept" / "steps.jsonl").read_text().splitlines()]
    numbers = [(step["step"], step["version"], step["values"]["eval/trials"]) for step in steps]
    assert numbers == [(4, "ab/4", 2), (2, "ab/2", 2)]
    kept = [len((tmp_path / "kept" / f"step-{step}-ab.jsonl").read_text().splitlines()) for step in (2, 4)]
    assert kept == [2, 2]
    again = steno(*words, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, ""), "both are evaluated"


def test_what_can_not_be_evaluated_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "instruction": "x"}\n')
    spare = TrialResult("run", "g", "g.0", "a", "0", "aborted", "spare")
    (tmp_path / "spare.jsonl").write_text(json.dumps(spare.row()) + "\n")
    (tmp_path / "agent.py").write_text(AGENT)
    for words, said in (
        (["evaluate", "--tasks", "tasks.jsonl", "--engine-args=--x", "--", "true"], "need --model or --follow"),
        (
            ["evaluate", "--tasks", "tasks.jsonl", "--model", "M", "--proxy", "http://127.0.0.1:8000", "--", "true"],
            "proxy and model",
        ),
        (["evaluate", "--tasks", "typo.jsonl", "--model", "M", "--", "true"], "no such file or folder: typo.jsonl"),
        (["evaluate", "--tasks", "tasks.jsonl", "--model", "M"], "command"),
        (["evaluate", "--tasks", "tasks.jsonl", "--model", "M", "--reward", "none.py:f", "--", "true"], "none.py"),
        (
            ["evaluate", "--tasks", "tasks.jsonl", "--model", "M", "--results", "agent.py", "--", "true"],
            "agent.py, line 1: not the result of a trial",
        ),
        (["evaluate", "--tasks", "typo.jsonl", "--follow", "none", "--", "true"], "no such file or folder: typo.jsonl"),
        (["results", "none.jsonl"], "none.jsonl: no such file"),
        (["results", "spare.jsonl"], "spare.jsonl has no trials"),
    ):
        done = steno(*words, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (2, True), (words, done.stderr)
        assert "serving" not in done.stderr, words


def test_a_file_of_two_evaluations_is_counted_and_said(tmp_path: Path) -> None:
    rows = [TrialResult(run, "g", f"{run}.0", "a", "0", "completed", "completed", reward=1.0).row() for run in "xy"]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = steno("results", "both.jsonl", cwd=tmp_path)
    assert (done.returncode, "2 trials with a reward" in done.stdout) == (0, True)
    assert done.stderr == "warning: both.jsonl has trials of 2 runs of the same tasks, counted together: x, y\n"
