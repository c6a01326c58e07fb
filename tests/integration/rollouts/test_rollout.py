"""`steno rollout` as a process, against the whole product."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.contracts.records import Session
from steno.demo_task import make_world
from tests.integration.rollouts.conftest import ADMIN, TOY, Rollout

Sessions = Callable[[str], list[Session]]
REWARD = """
def solved(task, workdir, exit_code, transcript):
    assert task["_answer"] and workdir.is_dir() and exit_code == 0
    turns = transcript.turns
    return {"reward": float(task["_answer"] in transcript.last_reply), "turns": len(turns)}
"""


def seeds(*numbers: int) -> list[dict[str, object]]:
    return [{"id": f"world-{n}", "seed": n, "_answer": make_world(n).code_word} for n in numbers]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_agents_run_and_a_function_scores_them(rollout: Rollout, sessions: Sessions) -> None:
    (rollout.folder / "score.py").write_text(REWARD)
    said = rollout(
        rollout.tasks(*seeds(1, 2)), "--run", "scored", "--group-size", "2", "--in-flight", "2",
        "--reward", f"{rollout.folder / 'score.py'}:solved", command=TOY,
    )  # fmt: skip
    recorded = sessions("scored")
    assert len(recorded) == 4 and {session.status for session in recorded} == {"completed"}
    assert [session.reward for session in recorded] == [1.0] * 4
    assert all(session.metrics["turns"] == session.counts.turns >= 4 for session in recorded)
    assert len({session.group_id for session in recorded}) == 2
    assert "4/4 trials" in said and "mean reward 1.000" in said and "0 failed" in said
    rows = rollout.rows()
    assert {row["trial_id"] for row in rows} == {session.trial_id for session in recorded}
    assert all(row["end_reason"] == "completed" and row["attempts"] == 1 and row["folder"] is None for row in rows)
    assert not list((rollout.folder / "work").iterdir())


def test_a_trial_is_told_its_task_and_nothing_of_the_operators(rollout: Rollout, sessions: Sessions) -> None:
    rollout.environment = {"STENO_ADMIN_KEY": ADMIN, "OPENAI_API_KEY": "sk-of-the-operator", "GOOGLE_API_KEY": "g"}
    code = (
        "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:], os.getcwd()], open('seen.json', 'w'));"
        "open('reward.txt', 'w').write('0.25')"
    )
    task = {"id": "t", "question": "why?", "limits": {"max": 3}, "_answer": "42", "gold": "g0"}
    rollout(
        rollout.tasks(task), "--run", "told", "--group-size", "1", "--keep", "all", "--hide", "gold",
        command=[*python(code), "{question}", "{limits.max}", "{OPENAI_BASE_URL}", "${question}", "{{question}}"],
    )  # fmt: skip
    row = rollout.rows()[0]
    variables, words, folder = json.loads(Path(row["folder"], "work", "seen.json").read_text())
    trial = row["trial_id"]
    base = f"{rollout.stack.url}/{trial}"
    assert words == ["why?", "3", f"{base}/v1", "${question}", "{question}"]
    assert variables["OPENAI_BASE_URL"] == f"{base}/v1" and variables["ANTHROPIC_BASE_URL"] == base
    assert variables["GOOGLE_GEMINI_BASE_URL"] == base and variables["STENO_TRIAL_ID"] == trial
    keys = {variables[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC", "GEMINI")}
    assert len(keys) == 1 and not keys & {"none", "sk-of-the-operator", ADMIN}
    assert variables["STENO_TASK_QUESTION"] == "why?" and variables["STENO_TASK_LIMITS"] == '{"max": 3}'
    assert Path(variables["STENO_WORKDIR"]) == Path(folder)
    assert json.loads(Path(variables["STENO_TASK_FILE"]).read_text()) == {
        "task_id": "t", "id": "t", "question": "why?", "limits": {"max": 3},
    }  # fmt: skip
    everything = json.dumps(variables)
    assert "42" not in variables.values() and "g0" not in everything and ADMIN not in everything
    assert "STENO_ADMIN_KEY" not in variables and "GOOGLE_API_KEY" not in variables
    assert sessions("told")[0].reward == 0.25


@pytest.mark.parametrize(
    ("code", "reason", "status", "detail"),
    [
        ("pass", "no_reward", "completed", "no reward.json and no reward.txt"),
        ("open('reward.txt', 'w').write('good')", "reward_error", "completed", "one number is expected, not 'good'"),
        ("open('reward.json', 'w').write('[1]')", "reward_error", "completed", "an object with `reward` is expected"),
        ("open('reward.json', 'w').write('{\"reward\": NaN}')", "reward_error", "completed", "finite number"),
        ("raise SystemExit(3)", "exit_code", "aborted", "exit code 3"),
        ("import time; time.sleep(600)", "timeout", "aborted", "ended after 3 s"),
    ],
)
def test_a_trial_that_fails_ends_with_its_reason(
    rollout: Rollout, sessions: Sessions, code: str, reason: str, status: str, detail: str
) -> None:
    run = f"failing-{abs(hash(code))}"
    options = ("--run", run, "--group-size", "1", "--retries", "0", "--timeout-s", "3")
    said = rollout(rollout.tasks({"id": "t"}), *options, command=python(code), code=1)
    session = sessions(run)[0]
    assert (session.status, session.end_reason, session.reward) == (status, reason, None)
    row = rollout.rows()[0]
    assert row["end_reason"] == reason and detail in row["detail"] and detail in said
    assert Path(row["folder"], "stderr.log").exists()


def test_a_task_that_lacks_a_field_is_named_before_anything_is_registered(rollout: Rollout, sessions: Sessions) -> None:
    tasks = rollout.tasks({"id": "a", "repo": "x"}, {"id": "b"})
    said = rollout(tasks, "--run", "lacking", command=["echo", "{repo}", "{commit}"], code=2)
    assert "{commit}: task 'a' has no such field; it has id, repo, task_id" in said
    assert sessions("lacking") == []


def test_a_folder_of_tasks_runs_each_in_a_copy_of_its_environment(rollout: Rollout, sessions: Sessions) -> None:
    for name in ("one", "two"):
        folder = rollout.folder / "tasks" / name
        for inner in ("environment", "tests"):
            (folder / inner).mkdir(parents=True)
        (folder / "task.toml").write_text(f"[metadata]\nworth = {len(name)}\n[agent]\ntimeout_sec = 100\n")
        (folder / "instruction.md").write_text(f"Do {name}.")
        (folder / "environment" / "start.txt").write_text(name)
        (folder / "tests" / "expected.txt").write_text("Do it well.")
    code = (
        "import os; assert sorted(os.listdir()) == ['instruction.md', 'start.txt']\n"
        "open('reward.txt', 'w').write('{metadata.worth}')"
    )
    rollout(rollout.folder / "tasks", "--run", "folders", "--group-size", "1", command=python(code))
    recorded = sessions("folders")
    assert [session.reward for session in recorded] == [3.0, 3.0] and len({s.group_id for s in recorded}) == 2


def test_ctrl_c_ends_what_runs_says_so_on_record_and_the_same_run_goes_on(rollout: Rollout, sessions: Sessions) -> None:
    flag = rollout.folder / "go"
    code = (
        "import os, pathlib, time, openai\n"
        "openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "pathlib.Path(os.environ['STENO_WORKDIR'], 'begun').touch()\n"
        f"while not os.path.exists({str(flag)!r}): time.sleep(0.1)\n"
        "open('reward.txt', 'w').write('1')"
    )
    tasks = rollout.tasks({"id": "a"}, {"id": "b"})
    options = ("--run", "stopped", "--group-size", "2", "--in-flight", "3")
    with rollout.start(tasks, *options, command=python(code)) as process:
        try:
            _until(lambda: len(list((rollout.folder / "work").glob("*/work/begun"))) == 3)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130 and "cancelled; --run stopped goes on" in said
    ends = {session.trial_id: session.end_reason for session in sessions("stopped")}
    assert sorted(ends.values(), key=str) == [None, *["cancelled"] * 3]
    assert [row["end_reason"] for row in rollout.rows()] == ["cancelled"] * 3
    flag.touch()
    said = rollout(tasks, *options, command=python(code))
    assert "4/4 trials, 3 of them earlier" in said and "mean reward 1.000" in said
    rows = rollout.rows()
    assert len(rows) == 4 and rows[-1]["trial_id"] == next(trial for trial, reason in ends.items() if reason is None)


def test_a_second_ctrl_c_leaves_a_command_no_time(rollout: Rollout, sessions: Sessions) -> None:
    deaf = "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path('begun').touch(); time.sleep(600)"
    options = ("--run", "twice", "--group-size", "1", "--grace-s", "500")
    with rollout.start(rollout.tasks({"id": "a"}), *options, command=python(deaf)) as process:
        try:
            _until(lambda: bool(list((rollout.folder / "work").glob("*/work/begun"))))
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 130
    assert [session.end_reason for session in sessions("twice")] == ["cancelled"]


def test_a_killed_rollout_goes_on_and_what_it_left_running_is_ended(rollout: Rollout, sessions: Sessions) -> None:
    flag = rollout.folder / "go"
    code = (
        "import os, pathlib, time, openai\n"
        "pathlib.Path('../own.pid').write_text(str(os.getpid()))\n"
        "if os.environ['STENO_TASK_TASK_ID'] == 'a':\n"
        "    openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "    pathlib.Path('../asked').touch()\n"
        f"while not os.path.exists({str(flag)!r}): time.sleep(0.1)\n"
        "open('reward.txt', 'w').write('1')"
    )
    tasks = rollout.tasks({"id": "a"}, {"id": "b"}, {"id": "c"})
    # Confined trials end with their rollouts, and know their processes by other numbers (test_confine.py).
    options = ("--run", "killed-whole", "--group-size", "1", "--in-flight", "2", "--confine", "off")
    work = rollout.folder / "work"
    with rollout.start(tasks, *options, command=python(code)) as process:
        try:
            _until(lambda: len(list(work.glob("*/own.pid"))) == 2 and len(list(work.glob("*/asked"))) == 1)
        finally:
            process.kill()
    left = [int(path.read_text()) for path in work.glob("*/own.pid")]
    assert all(Path(f"/proc/{pid}").exists() for pid in left)
    restarted = rollout.start(tasks, *options, command=python(code))
    try:
        _until(lambda: not any(_runs(pid) for pid in left))
        flag.touch()
        _, said = restarted.communicate(timeout=240)
    finally:
        restarted.kill()
        restarted.wait()
    assert restarted.returncode == 0, said
    by_task = {row["task_id"]: row["end_reason"] for row in rollout.rows()}
    assert by_task == {"a": "interrupted", "b": "completed", "c": "completed"}
    assert sorted(session.counts.turns for session in sessions("killed-whole")) == [0, 0, 1]


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
