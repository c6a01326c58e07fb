"""`steno rollout` as a process, against the whole product."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from steno_cli.demo.task import make_world
from tests.integration.rollouts.conftest import ADMIN, SCRIPT, TOY, Rollout
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT, running

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
    with Client(rollout.stack.url, ADMIN) as steno:
        assert steno.run("scored").rollouts_over, "the trainer need not wait for more"
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
    assert "42" not in variables.values() and not re.search(r"\bg0\b", everything) and ADMIN not in everything
    assert "STENO_ADMIN_KEY" not in variables and "GOOGLE_API_KEY" not in variables
    assert sessions("told")[0].reward == 0.25
    with Client(rollout.stack.url, ADMIN) as steno:
        group = steno.group(row["group_id"])
    assert "_answer" not in group.task and group.withheld == {"_answer": "42", "gold": "g0"}


@pytest.mark.parametrize(
    ("code", "reason", "status", "detail"),
    [
        ("pass", "no_reward", "completed", "no reward.json and no reward.txt"),
        ("open('reward.txt', 'w').write('good')", "reward_error", "completed", "got 'good', must be one number"),
        ("open('reward.json', 'w').write('[1]')", "reward_error", "completed", "must be an object with `reward`"),
        ("open('reward.json', 'w').write('{\"reward\": NaN}')", "reward_error", "completed", "finite number"),
        ("raise SystemExit(3)", "exit_code", "aborted", "exit code 3"),
        ("import time; time.sleep(600)", "timeout", "aborted", "ended after 3 s"),
    ],
)
def test_a_trial_that_fails_ends_with_its_reason(
    rollout: Rollout, sessions: Sessions, code: str, reason: str, status: str, detail: str
) -> None:
    run = f"failing-{abs(hash(code))}"
    limit_s = "3" if reason == "timeout" else "300"
    options = ("--run", run, "--group-size", "1", "--retries", "0", "--timeout-s", limit_s)
    said = rollout(rollout.tasks({"id": "t"}), *options, command=python(code), code=1)
    session = sessions(run)[0]
    assert (session.status, session.end_reason, session.reward) == (status, reason, None)
    row = rollout.rows()[0]
    assert row["end_reason"] == reason and detail in row["detail"] and detail in said
    assert Path(row["folder"], "stderr.log").exists()


def test_a_task_that_lacks_a_field_is_named_before_anything_is_registered(rollout: Rollout, sessions: Sessions) -> None:
    tasks = rollout.tasks({"id": "a", "repo": "x"}, {"id": "b"})
    said = rollout(tasks, "--run", "lacking", command=["echo", "{repo}", "{commit}"], code=2)
    assert "{commit}: task 'a' (line 1) has no such field; it has id, repo, task_id" in said
    assert sessions("lacking") == []


def test_rows_are_chosen_and_the_same_ones_are_gone_on_with(rollout: Rollout, sessions: Sessions) -> None:
    """Of Parquet. The first start is stopped before a trial could do anything; the second one finds its groups again."""
    path = rollout.folder / "tasks.parquet"
    pq.write_table(pa.table({"id": [f"t{n}" for n in range(40)], "level": [n % 2 for n in range(40)]}), path)
    options = ("--run", "chosen", "--group-size", "1", "--retries", "0", "--stop-after-failures", "2")
    options = (*options, "--filter", "level=1", "--limit", "3", "--shuffle-seed", "5")
    rollout(path, *options, command=["false"], code=1)
    begun = {session.group_id for session in sessions("chosen")}
    say = f"{sys.executable} -m steno_cli.demo.toy_agent --seed 1 && echo {{level}} > reward.txt"
    rollout(path, *options, command=["sh", "-c", say])
    ended = {session.group_id for session in sessions("chosen")}
    assert begun and begun <= ended and len(ended) == 3
    assert [session.reward for session in sessions("chosen")] == [1.0] * 3, "none of level 0"
    said = rollout(path, "--run", "none", "--filter", "levl=1", command=["true"], code=2)
    assert "filter: none of 40 tasks has a field 'levl'" in said and sessions("none") == []
    said = rollout(path, "--run", "none", "--filter", "level=", command=["true"], code=2)
    assert "got 'level=', must be FIELD=GLOB, FIELD!=GLOB, or GLOB for the task's name" in said


def test_a_command_that_trials_would_not_find_is_told_before_anything_is_registered(
    rollout: Rollout, sessions: Sessions
) -> None:
    """In the environment and the confinement that trials get: what is hidden from them is not there."""
    tasks = rollout.tasks({"id": "a"})
    said = rollout(tasks, "--run", "no-command", command=["no-such-agent", "{id}"], code=2)
    assert "command: no-such-agent: not found on the PATH of trials, " in said
    hidden = rollout.folder / "bin" / "agent"
    hidden.parent.mkdir()
    hidden.write_text("#!/bin/sh\n")
    said = rollout(tasks, "--run", "no-command", command=[str(hidden)], code=2)
    assert f"command: {hidden}: there is no such program, or it is not executable (chmod +x)" in said
    hidden.chmod(0o755)
    options = ("--run", "no-command", "--private", str(hidden.parent), "--confine", "require")
    said = rollout(tasks, *options, command=[str(hidden)], code=2)
    assert f"command: {hidden}: there is no such program, or it is not executable (chmod +x) (confined:" in said
    assert sessions("no-command") == [] and not list((rollout.folder / "work").iterdir())


def test_what_failed_before_its_first_turn_stops_the_rollouts_and_is_run_again_by_the_same_run(
    rollout: Rollout, sessions: Sessions, client: Client
) -> None:
    """The script is there, and what it starts is not. With the run's own key, which is all that is needed."""
    mini = rollout.folder / "mini"
    agent = rollout.folder / "agent.sh"
    agent.write_text(f"#!/bin/sh\nexec {mini}\n")
    agent.chmod(0o755)
    tasks = rollout.tasks(*({"id": str(number)} for number in range(3)))
    key = client.run_key("burned")
    assert key is not None
    options = ("--run", "burned", "--group-size", "2", "--in-flight", "6", "--retries", "0", "--key", key)
    options = (*options, "--stop-after-failures", "3")
    said = rollout(tasks, *options, command=[str(agent)], code=1)
    assert "stopped: 3 trials in a row failed before their first turn. The last was " in said
    assert f"with exit code 127: {agent}: 2: exec: {mini}: not found" in said or "exit code 127" in said
    assert "start the same --run again" in said and "0/6 trials, 0 running" in said
    assert "3 failed before their first turn, still open" in said
    assert {session.status for session in sessions("burned")} == {"open"}, "two groups, the third was not begun"
    assert len(sessions("burned")) == 4 and rollout.rows() == []
    mini.write_text(f"#!/bin/sh\n{sys.executable} -m steno_cli.demo.toy_agent --seed 1 && echo 1 > reward.txt\n")
    mini.chmod(0o755)
    said = rollout(tasks, *options, command=[str(agent)])
    assert "6/6 trials, 0 running, 3/3 groups, mean reward 1.000, 0 failed" in said
    assert "no trainer of run burned has been seen: start it: steno train --run burned" in said
    assert [session.reward for session in sessions("burned")] == [1.0] * 6


def test_a_proxy_that_is_not_there_is_told_of_at_once(rollout: Rollout) -> None:
    words = rollout.words(rollout.tasks({"id": "a"}), command=["true"])
    words[words.index("--proxy") + 1] = f"http://127.0.0.1:{free_port()}"
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "no answer" in line)
            assert process.poll() is None, "it goes on asking: a proxy may be about to start"
        finally:
            process.kill()
    assert "no answer from the proxy at http://127.0.0.1:" in said and "(--proxy" in said


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
    assert process.returncode == 130 and "cancelled; to go on, start the same command with --run stopped" in said
    ends = {session.trial_id: session.end_reason for session in sessions("stopped")}
    assert sorted(ends.values(), key=str) == [None, *["cancelled"] * 3]
    assert [row["end_reason"] for row in rollout.rows()] == ["cancelled"] * 3
    flag.touch()
    said = rollout(tasks, *options, command=python(code))
    assert "4/4 trials, 3 of them earlier" in said and "mean reward 1.000" in said
    rows = rollout.rows()
    assert len(rows) == 4 and rows[-1]["trial_id"] == next(trial for trial, reason in ends.items() if reason is None)


def test_a_second_ctrl_c_leaves_a_command_no_time(rollout: Rollout, sessions: Sessions) -> None:
    deaf = (
        "import pathlib, signal, time; signal.signal(15, lambda *_: pathlib.Path('told').touch());"
        "pathlib.Path('begun').touch(); time.sleep(600)"
    )
    options = ("--run", "twice", "--group-size", "1", "--grace-s", "500")
    with rollout.start(rollout.tasks({"id": "a"}), *options, command=python(deaf)) as process:
        try:
            _until(lambda: bool(list((rollout.folder / "work").glob("*/work/begun"))))
            process.send_signal(signal.SIGINT)
            _until(lambda: bool(list((rollout.folder / "work").glob("*/work/told"))))
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
    # Confined trials end with their rollouts, and know their processes by other numbers (executors/test_confine.py).
    options = ("--run", "killed-whole", "--group-size", "1", "--in-flight", "2", "--confine", "off")
    work = rollout.folder / "work"
    with rollout.start(tasks, *options, command=python(code)) as process:
        try:
            _until(
                lambda: (
                    len([path for path in work.glob("*/own.pid") if path.read_text()]) == 2
                    and len(list(work.glob("*/asked"))) == 1
                )
            )
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


def test_rollouts_wait_for_a_worker_before_their_first_trial(tmp_path: Path) -> None:
    with running(tmp_path / "stack", None, proxy=["--admin-key", ADMIN, "--worker-key", "worker-key"]) as stack:
        rollout = Rollout(stack, tmp_path)
        words = ["--group-size", "1", "--progress-s", "0.2"]
        with rollout.start(rollout.tasks(*seeds(1)), *words, command=TOY) as process:
            try:
                assert process.stderr is not None
                heard = ""
                while "no worker serves a model" not in heard:
                    line = process.stderr.readline()
                    assert line, heard
                    heard += line
                with Client(stack.url, ADMIN) as steno:
                    assert not list(steno.sessions()), "a group would grow old meanwhile"
                stack.start_worker("--engine", "scripted", "--script", f"{SCRIPT}:reply", "--key", "worker-key")
                _, said = process.communicate(timeout=240)
            finally:
                process.kill()
        assert process.returncode == 1, heard + said  # nothing scores it
        (row,) = rollout.rows()
        assert (row["end_reason"], row["attempts"], row["turns"]) == ("no_reward", 1, 5)


def test_trials_of_a_group_may_begin_with_a_recorded_turn(rollout: Rollout, client: Client) -> None:
    """Prefix sampling: each is told the first turn, and goes on for itself; what was told is counted nowhere."""
    tasks = rollout.tasks(*seeds(3))
    (rollout.folder / "score.py").write_text(REWARD)
    scored = ["--reward", f"{rollout.folder / 'score.py'}:solved"]
    rollout(tasks, "--run", "origins", "--group-size", "1", *scored, command=TOY)
    [origin] = client.sessions(run_id="origins")
    first, *rest = client.turns(origin.trial_id)
    forked = [*scored, "--run", "forks", "--group-size", "2", "--fork-of", f"{origin.trial_id}/{first.turn_id}"]
    rollout(tasks, *forked, "--fork-may-differ", "dates", command=TOY)
    trials = list(client.sessions(run_id="forks"))
    assert len(trials) == 2
    for trial in trials:
        assert trial.fork_of is not None and trial.fork_of.may_differ == ["dates"]
        told, *sampled = client.turns(trial.trial_id)
        assert (
            told.turn_id == first.turn_id and told.replayed == first.completion_tokens and len(sampled) == len(rest) > 0
        )
        assert trial.counts.completion_tokens == sum(turn.completion_tokens for turn in sampled)
    refused = rollout(tasks, "--fork-of", "no-turn", command=TOY, code=2)
    assert "got 'no-turn', must be TRIAL_ID/TURN_ID" in " ".join(refused.split())
