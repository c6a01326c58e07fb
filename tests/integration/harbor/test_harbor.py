"""`steno rollout --harbor`: Harbor's agents in Podman's containers, as recorded trials."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from steno.client.client import Client
from tests.integration.agents.support import NOON
from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import SHELL, Harbor, Sessions
from tests.integration.rollouts.conftest import ADMIN, Rollout
from tests.support.machine import agents_image
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running

pytestmark = pytest.mark.harbor

CHECK = """#!/bin/bash
if grep -q hello /app/answer.txt; then r=1; else r=0; fi
printf '{"reward": %s, "tests": 3}' $r >/logs/verifier/reward.json
"""
AGAIN = """#!/bin/bash
if grep -q again /app/answer.txt; then r=0.5; else r=0; fi
printf '{"reward": %s}' $r >/logs/verifier/reward.json
"""
WRITE = "Write hello into answer.txt.\nRUN: pwd\nRUN: echo hello >/app/answer.txt\n"
READ = "Add to it.\nRUN: cat /app/answer.txt\nRUN: echo again >>/app/answer.txt\n"
APART = f'artifacts = ["/app"]\nenvironment.env = {{TZ = "{NOON}"}}\n'
STEPS = f'{APART}unheard_of = [1, {{a = "é"}}]\n[[steps]]\nname = "schreib es"\n[[steps]]\nname = "prüf es"\n'
TURN = "python3 /opt/task/agent.py >answer.txt\n"
"""Of the agent that is a script: one turn."""


def rewards(rollout: Harbor) -> dict[str, dict[str, Any]]:
    """Rows of the results by task; of several trials, the last one's."""
    return {row["task_id"]: row for row in rollout.rows()}


OWN = """case "$STENO_TASK_TASK_ID" in
apart)
  export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
  mini-swe-agent -y --exit-immediately -l 0 -m openai/policy --model-class litellm -c mini.yaml \\
    -c "model.model_kwargs.api_base=$OPENAI_BASE_URL" -t "$STENO_TASK_INSTRUCTION" ;;
*)
  export IS_SANDBOX=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
  claude -p "$STENO_TASK_INSTRUCTION" --model policy --dangerously-skip-permissions ;;
esac"""
"""The agents as commands, for containers without Harbor."""


def leaves(stack: Stack, trial_id: str) -> int:
    """Ends of conversations in a trial: 1 where each turn goes on from the one before."""
    with Client(stack.url, ADMIN) as client:
        return len(client.samples(trial_id))


def test_mini_swe_agent_is_recorded_and_rewarded(rollout: Harbor) -> None:
    """And scored with its group, by what Harbor's verifier said. And the same tasks in containers without Harbor: by it, and by
    Claude Code."""
    judge = rollout.folder / "judge.py"
    judge.write_text("def ranked(trials): return [one.reward + one.metrics['tests'] for one in trials]\n")
    rollout.task("apart", APART, {"instruction.md": WRITE, "tests/test.sh": CHECK})
    tasks = rollout.task("shared", "", {"instruction.md": WRITE, "tests/test.sh": CHECK})
    options = ("--agent", "mini-swe-agent", "--agent-in-image", "--group-size", "1")
    said = rollout(tasks, "--run", "mini", *options, "--group-reward", f"{judge}:ranked", command=[])
    found = rewards(rollout)
    assert {name: (row["end_reason"], row["reward"], row["turns"]) for name, row in found.items()} == {
        "apart": ("completed", 4.0, 3),
        "shared": ("completed", 4.0, 3),
    }, said
    assert "1 of 2 tasks (shared): their verifier runs in the sandbox that their agent had" in said
    assert [found[name]["metrics"].get("shared_verifier") for name in ("apart", "shared")] == [None, 1.0]
    assert (found["apart"]["metrics"]["tests"], found["apart"]["metrics"]["own_reward"]) == (3.0, 1.0)
    for row in found.values():
        assert leaves(rollout.stack, row["trial_id"]) == 1
        (trajectory,) = Path(row["folder"]).glob("harbor/*/agent/trajectory.json")
        assert len(json.loads(trajectory.read_text())["steps"]) >= 3
        assert list(Path(row["folder"]).glob("harbor/*/result.json")) and not (Path(row["folder"]) / "task").exists()
    assert rollout.left() == []
    own = Rollout(rollout.stack, rollout.folder / "own")
    own.folder.mkdir()
    options = ("--executor", "podman", "--forwarder-image", agents_image.NAME, "--group-size", "1", "--in-flight", "2")
    said = own(tasks, "--run", "own", *options, command=["sh", "-c", OWN])
    assert {row["task_id"]: (row["end_reason"], row["reward"], row["turns"]) for row in own.rows()} == {
        "apart": ("completed", 1.0, 3), "shared": ("completed", 1.0, 3),
    }, said  # fmt: skip
    assert [leaves(own.stack, row["trial_id"]) for row in own.rows()] == [1, 1] and rollout.left() == []
    images = [row["image"] for row in (*found.values(), *own.rows())]
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", image) for image in images), images
    assert own.rows()[0]["image"] == own.rows()[1]["image"], "built once for both"


def test_claude_code_goes_on_from_step_to_step(rollout: Harbor) -> None:
    """Whatever they are called; each turn names its own."""
    first, second = "schreib es", "prüf es"
    steps = {f"steps/{first}/instruction.md": WRITE, f"steps/{second}/instruction.md": READ}
    tests = {f"steps/{first}/tests/test.sh": CHECK, f"steps/{second}/tests/test.sh": AGAIN}
    tasks = rollout.task("zwei Schritte é", STEPS, {**steps, **tests})
    options = ("--agent", "claude-code", "--agent-in-image", "--resume-steps", "--group-size", "1")
    said = rollout(tasks, "--run", "claude", *options, command=[])
    row = rewards(rollout)["zwei Schritte é"]
    assert (row["end_reason"], row["reward"], row["turns"]) == ("completed", 0.75, 6), said
    assert {name: value for name, value in row["metrics"].items() if name != "rollout/wall_s"} == {
        "tests": 1.5, f"step/{first}/reward": 1.0, f"step/{first}/tests": 3.0, f"step/{second}/reward": 0.5,
    }  # fmt: skip
    with Client(rollout.stack.url, ADMIN) as client:
        assert [turn.task_step for turn in client.turns(row["trial_id"])] == [first] * 3 + [second] * 3
    assert leaves(rollout.stack, row["trial_id"]) == 1, "the second step goes on from the first"
    assert rollout.left() == []


def test_what_each_way_to_end_is_worth(rollout: Harbor, sessions: Sessions) -> None:
    agent = {"environment/agent.py": AGENT}
    late = "[agent]\ntimeout_sec = 60\n"
    for name, toml, instruction, tests in (
        ("late", late, f"{TURN}sleep 600\n", CHECK),
        ("failed", "", f"{TURN}exit 7\n", "exit 0"),
        ("silent", "", TURN, "exit 0"),
        ("other-key", "", TURN, 'echo \'{"score": 1, "found": 2}\' >/logs/verifier/reward.json'),
    ):
        verifier = tests if tests.startswith("#!") else f"#!/bin/bash\n{tests}\n"
        tasks = rollout.task(
            name, f"{APART}{toml}", {"instruction.md": instruction, "tests/test.sh": verifier, **agent}
        )
    said = rollout(tasks, "--run", "ends", "--agent", SHELL, "--group-size", "1", "--in-flight", "2", command=[])
    found = rewards(rollout)
    assert {name: (row["end_reason"], row["reward"], row["turns"]) for name, row in found.items()} == {
        "late": ("timeout", 1.0, 1),
        "failed": ("exit_code", None, 1),
        "silent": ("reward_error", None, 1),
        "other-key": ("reward_error", None, 1),
    }, said
    assert "exit code 7" in found["failed"]["detail"]
    assert "RewardFileNotFoundError" in found["silent"]["detail"]
    assert found["other-key"]["detail"] == "reward_key: the verifier gave no 'reward'; it gave found, score"
    assert rollout.left() == []


def test_rollouts_that_were_ended_leave_no_sandbox_and_nothing_runs_twice(rollout: Harbor, sessions: Sessions) -> None:
    """Killed; by Ctrl-C; by two of them. The same command goes on each time."""
    script = f'{TURN}case "$OPENAI_BASE_URL" in *.3/v1) ;; *) sleep 600 ;; esac\n'
    tasks = rollout.task("t", APART, {"instruction.md": script, "tests/test.sh": CHECK, "environment/agent.py": AGENT})
    options = ("--run", "ended", "--agent", SHELL, "--group-size", "4", "--sequential")

    def ended(trial: int, *signals: signal.Signals) -> tuple[int, str]:
        """Rollouts that are told so in the middle of this trial: their exit code, and what they said."""
        with rollout.start(tasks, *options, command=[]) as process:
            until = time.monotonic() + 900
            while not any(
                name.endswith(f".{trial}") and found.counts.turns for name, found in sessions("ended").items()
            ):
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.1)
            for each in signals:
                process.send_signal(each)
                time.sleep(0.5)  # two at a time are one
            _, said = process.communicate(timeout=600)
            return process.returncode, said

    def is_gone() -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):  # while one is being removed
            return rollout.left() == []
        return False

    assert ended(0, signal.SIGKILL)[0] == -signal.SIGKILL
    until(is_gone, "Harbor has not removed its sandbox")
    code, said = ended(1, signal.SIGINT)
    assert code == 130 and "cancelled; to go on, start the same command with --run ended" in said
    assert rollout.left() == [] and "that Harbor left" not in said, "Harbor has removed its sandbox"
    code, said = ended(2, signal.SIGINT, signal.SIGINT)
    assert code == 130 and rollout.left() == [], said
    said = rollout(tasks, *options, command=[])
    found = sorted(rollout.rows(), key=lambda row: row["trial_id"])
    assert [(row["end_reason"], row["reward"], row["turns"]) for row in found] == [
        ("interrupted", None, 1), ("cancelled", None, 1), ("cancelled", None, 1), ("completed", 1.0, 1),
    ], said  # fmt: skip
    assert rollout.left() == []


def test_what_cannot_work_is_said_before_a_group_is_registered(
    rollout: Harbor, sessions: Sessions, tmp_path: Path
) -> None:
    tasks = rollout.task("t", APART, {"instruction.md": "true\n", "tests/test.sh": CHECK})
    said = rollout(tasks, "--run", "absent", "--agent", "cursor-cli", command=[], code=2)
    assert "agent: cursor-cli can't be pointed at the proxy: it works with its maker's service only" in said
    said = rollout(tasks, "--run", "absent", "--agent", "no-such", command=[], code=2)
    assert "agent: got 'no-such', must be FILE.py:Class or one of Harbor's: acp, aider" in said
    said = rollout(tasks, "--run", "absent", "--agent", "codex", "--agent-in-image", command=[], code=2)
    assert "harbor: task 't': its sandbox can't be set up: RuntimeError: codex is not in the image of this task" in said
    (tmp_path / "registries.conf").write_text("")  # of none, whatever this machine reaches
    rollout.environment = {"CONTAINERS_REGISTRIES_CONF": str(tmp_path / "registries.conf")}
    said = rollout(tasks, "--run", "absent", "--agent", SHELL, "--allow-only-proxy", command=[], code=2)
    assert "network_mode='allowlist' is not supported" in said and "(--allow-only-proxy: with Docker and Podman" in said
    assert sessions("absent") == {} and rollout.left() == []
    rollout.environment = {}
    keys = ["--admin-key", ADMIN, "--worker-key", "worker-key"]
    with running(
        tmp_path / "proxy", None, proxy=["--host", "0.0.0.0", *keys, "--public-url", "http://127.0.0.1:9/x"]
    ) as far:
        rollout.stack = far
        said = rollout(tasks, "--run", "far", "--agent", SHELL, command=[], code=1)
    assert "GET http://127.0.0.1:9/x/healthz from inside it (podman) failed: " in said
    assert rollout.left() == []
