"""`steno rollout --executor podman`, with real containers: what trials get, what ends them, who says what they were worth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.records import Session
from tests.integration.containers.conftest import ADMIN, Containers
from tests.support.machine.far_host import PORT, far_host
from tests.support.machine.tiny_image import NAME
from tests.support.programs.stack import ROOT, running

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
AGENT = (HERE / "agent.py").read_text()
THIEF = (HERE / "thief.py").read_text()
DOCKERFILE = (
    f'FROM {NAME}\nCOPY . /opt/agent/\nCOPY given.txt /app/\nENV GREETING=hello\nENTRYPOINT ["/no"]\nWORKDIR /app\n'
)
EMPTY = f"FROM {NAME}\nCOPY . /opt/agent/\nWORKDIR /nothing/here\n"
SECRET = "a-secret-of-the-launcher"
RAN = """cat given.txt answer.txt && grep -q hello answer.txt
"""

Sessions = Callable[[str], dict[str, Session]]


def rewards(rollout: Containers) -> dict[str, dict[str, Any]]:
    """Rows of the results by task; of several trials, the last one's."""
    return {row["task_id"]: row for row in rollout.rows()}


def test_a_task_is_built_once_run_and_verified(rollout: Containers, sessions: Sessions) -> None:
    """Also: what is in the container, and what each way to end is worth."""
    shell = {"mark_txt": uuid.uuid4().hex, "given_txt": "given\n", "agent_py": AGENT, "Dockerfile": DOCKERFILE}
    say = "python3 /opt/agent/agent.py"
    for name, do, tests in (
        (
            "solved",
            f"{say} >answer.txt; ls; echo $GREETING $HOME $PWD; echo bad >&2; rm given.txt",
            "[ ! -e given.txt ]",
        ),
        ("missed", f"{say}; exit 7", "exit 3"),
        ("by-file", f"{say}; touch made", 'echo \'{"reward": 0.25, "found": 2}\' >/logs/verifier/reward.json; exit 9'),
        ("broken", say, "no-such-program"),
        ("slow-tests", say, "sleep 600"),
        ("polite", f"trap 'touch bye; exit' TERM; {say}; while :; do sleep 0.1; done", "[ -e bye ]"),
        ("large", f"{say}; python3 -c 'x = bytearray(10**9)'", "exit 1"),
        ("own-file", f"{say}; echo 0.5 >reward.txt", None),
        ("in-words", f'echo "$STENO_TASK_METADATA" >answer.txt; {say}', "env; grep -q do answer.txt"),
    ):
        limit = "[agent]\ntimeout_sec = 45\n" if name == "polite" else ""
        slow = "[verifier]\ntimeout_sec = 10\n" if name == "slow-tests" else ""
        toml = f"{limit}{slow}[environment]\nmemory_mb = 128\n[metadata]\ndo = {json.dumps(do)}\n"
        tasks = rollout.task(name, toml=toml, tests=tests, **shell)
    rollout.environment = {"SECRET": SECRET, "OPENAI_API_KEY": "sk-of-the-operator"}
    before = built(rollout)
    said = rollout(
        tasks, "--run", "kinds", "--group-size", "1", "--in-flight", "4", "--keep", "all", "--grace-s", "20",
        command=["sh", "-c", "{metadata.do}"],
    )  # fmt: skip
    found = rewards(rollout)
    ends = {name: (row["end_reason"], row["reward"], row["exit_code"]) for name, row in found.items()}
    assert ends == {
        "solved": ("completed", 1.0, 0),
        "missed": ("completed", 0.0, 7),
        "by-file": ("completed", 0.25, 0),
        "broken": ("reward_error", None, 0),
        "slow-tests": ("reward_error", None, 0),
        "polite": ("timeout", 1.0, 0),
        "large": ("completed", 0.0, 137),
        "own-file": ("completed", 0.5, 0),
        "in-words": ("completed", 1.0, 0),
    }, said
    assert found["by-file"]["metrics"]["found"] == 2.0
    assert (
        "tests/test.sh: exit code 127" in found["broken"]["detail"] and "no-such-program" in found["broken"]["detail"]
    )
    assert "did not end within 10 s" in found["slow-tests"]["detail"]
    folder = Path(found["solved"]["folder"])
    assert (folder / "stdout.log").read_text().split() == [
        "answer.txt",
        "given.txt",
        "instruction.md",
        "hello",
        "/home/trial",
        "/app",
    ]
    assert (folder / "stderr.log").read_text() == "bad\n"
    assert (folder / "work" / "answer.txt").read_text() == "hello\n"
    assert not (folder / "socket").exists()
    assert "API_KEY" not in (Path(found["in-words"]["folder"]) / "verifier" / "stdout.log").read_text()
    assert {session.counts.turns for session in sessions("kinds").values()} == {1}
    assert rollout.left() == [] and not (ROOT / "oom").exists()
    [image] = built(rollout) - before  # nine tasks with the same environment: one image
    assert {row["image"] for row in found.values()} == {image}


def built(rollout: Containers) -> set[str]:
    listed = [rollout.engine, "images", "localhost/steno-task", "--quiet", "--no-trunc"]
    return set(subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split())


def test_a_thief_wins_nothing(rollout: Containers, sessions: Sessions) -> None:
    """Its tests can't be bought: they run after it, elsewhere, and say 0. Without `tests/` its own reward file would win."""
    verifier = """before=$(cat beat); sleep 1
[ "$before" = "$(cat beat)" ] || exit 0
[ "$(python3 -c 'print(6 * 7)')" = 42 ] || exit 0
[ -f /tests/test.sh ] && [ ! -L /tests ] || exit 0
ls /logs/verifier | grep -q . && exit 0
exit 1
"""
    environment = {"given_txt": "", "agent_py": AGENT, "thief_py": THIEF, "Dockerfile": DOCKERFILE}
    tasks = rollout.task("t", tests=verifier, **environment)
    rollout.environment = {"SECRET": SECRET, "STENO_ADMIN_KEY": SECRET, "http_proxy": f"http://{SECRET}@127.0.0.1:9"}
    rollout.environment["no_proxy"] = "127.0.0.1"
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    with far_host() as far:  # which this machine reaches
        said = rollout(
            tasks, "--run", "thief", "--group-size", "2", "--keep", "all",
            command=["python3", "/opt/agent/thief.py", SECRET[:-3], f"{far}:{PORT}", str(rollout.stack.port), *addresses],
        )  # fmt: skip
    assert [session.reward for session in sessions("thief").values()] == [0.0, 0.0], said
    for row in rollout.rows():
        seen = json.loads((Path(row["folder"]) / "stdout.log").read_text())
        capabilities = [line.split() for line in seen.pop("status")]
        assert sorted(capabilities) == [["CapBnd:", "0" * 16], ["CapEff:", "0" * 16], ["NoNewPrivs:", "1"]]
        refused = {"PermissionError", "OSError", "FileNotFoundError"}
        for name in ("reward", "python", "site", "tests", "task"):
            assert seen.pop(name) in refused, name
        assert not any(each is True for each in seen.pop("machine"))
        assert seen.pop("far") == "OSError" and seen.pop("names") == "gaierror"
        assert seen == {
            "seen tests": False, "control": [403] * 4, "post": 403, "around": [403] * 3, "other": 403, "own": 200, "smuggled": 1,
            "environment": [], "processes": [], "user": os.geteuid() or 1000,
        }  # fmt: skip
        assert row["turns"] == 1
    assert rollout.left() == []


def test_rollouts_that_were_killed_are_cleaned_up_after_and_nothing_runs_twice(rollout: Containers) -> None:
    sleeps = "    time.sleep(600 if os.environ['STENO_TRIAL_ID'].endswith('.0') else 0)\n"
    sleeper = f"{AGENT}    import time\n    open('answered', 'w').close()\n{sleeps}"
    tasks = rollout.task("t", tests="exit 0", given_txt="", agent_py=sleeper, Dockerfile=DOCKERFILE)
    options = ("--run", "killed", "--group-size", "2", "--sequential")
    command = ["python3", "/opt/agent/agent.py"]
    with rollout.start(tasks, *options, command=command) as process:
        until = time.monotonic() + 300
        # A turn on record is not answered yet: its answer comes by way of the launcher.
        while not list((rollout.folder / "work").glob("*/work/answered")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    while not (sleeping := [name for name in rollout.left("--filter=status=running") if name.endswith("-agent")]):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert len(sleeping) == 1
    stranger = ["create", "--name=stranger", "--label=steno.trial=x", "--label=steno.run=x", NAME, "true"]
    subprocess.run([rollout.engine, *stranger], check=True, capture_output=True)
    said = rollout(tasks, *options, command=command)
    assert "left by rollouts that were killed" in said
    first, second = sorted(rollout.rows(), key=lambda row: row["trial_id"])
    assert (first["end_reason"], first["turns"]) == ("interrupted", 1)
    assert (second["end_reason"], second["reward"], second["turns"]) == ("completed", 1.0, 1)
    assert rollout.left() == ["stranger"], "containers of others stay"


def test_ctrl_c_leaves_no_container(rollout: Containers, sessions: Sessions) -> None:
    sleeper = AGENT + "    import time\n    time.sleep(600)\n"
    tasks = rollout.task("t", tests="exit 0", agent_py=sleeper, Dockerfile=EMPTY)
    options = ("--run", "ctrl-c", "--group-size", "1", "--grace-s", "1")
    with rollout.start(tasks, *options, command=["python3", "/opt/agent/agent.py"]) as process:
        until = time.monotonic() + 300
        while not any(session.counts.turns for session in sessions("ctrl-c").values()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert [session.end_reason for session in sessions("ctrl-c").values()] == ["cancelled"]
    assert rollout.left() == []


def test_what_the_first_sandbox_lacks_is_said_before_a_group_is_registered(
    rollout: Containers, sessions: Sessions
) -> None:
    tasks = rollout.tasks({"id": "t", "image": NAME})
    said = rollout(tasks, "--run", "absent", command=["no-such-agent"], code=2)
    assert "command: no-such-agent: not found on the PATH of trials, in the image of task 't'" in said
    said = rollout(tasks, "--run", "absent", "--forwarder-image", "localhost/none:1", command=["sh"], code=2)
    assert "localhost/none:1" in said
    said = rollout(rollout.tasks({"id": "t", "image": "two words"}), "--run", "absent", command=["sh"], code=2)
    assert "tasks: 't' (line 1): image: got 'two words', must be the name of an image" in said
    assert sessions("absent") == {} and rollout.left() == []


def test_a_public_url_that_is_not_reached_stops_the_rollouts_before_a_trial_runs(
    rollout: Containers, tmp_path: Path
) -> None:
    keys = ["--admin-key", ADMIN, "--worker-key", "worker-key"]
    with running(tmp_path / "proxy", None, proxy=[*keys, "--public-url", "http://127.0.0.1:9/steno"]) as stack:
        rollout.stack = stack
        options = ("--run", "far", "--group-size", "2", "--stop-after-failures", "0")
        said = rollout(rollout.tasks({"id": "t", "image": NAME}), *options, command=["touch", "ran"], code=1)
        admin = {"authorization": f"Bearer {ADMIN}"}
        found = httpx.get(f"{stack.url}/sessions", headers=admin, timeout=60).json()["items"]
    assert (
        "GET http://127.0.0.1:9/steno/healthz from inside it failed" in said
        and "can't connect to http://127.0.0.1:9" in said
    )
    assert "set the proxy's --public-url" in said
    assert all(session["counts"]["turns"] == 0 for session in found)
    assert rollout.left() == [] and not list((rollout.folder / "work").glob("*/work/ran"))
