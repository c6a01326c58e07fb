"""Tasks of Harbor's and the settings of `steno rollout --harbor`: what is pointed where, what runs, and what is refused."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError
from steno.contracts.records import Counts, Session
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome, EndReason
from steno_rollouts.trials.harbor import driver
from steno_rollouts.trials.harbor.executor import HarborExecutor, harbor_name
from steno_rollouts.trials.harbor.interpreter import HarborPython, environment
from steno_rollouts.trials.harbor.leftovers import _project
from steno_rollouts.trials.harbor.plan import HarborPlan, modes
from steno_rollouts.trials.harbor.pointing import POINTINGS, Addresses
from steno_rollouts.trials.harbor.tasks import harbor_folders, harbor_tasks
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, RunnerOptions
from tests.support.sources import ROOT

URL = "http://proxy:8000/steno/g.0"
ADDRESSES = Addresses({"openai": f"{URL}/v1", "anthropic": URL, "gemini": URL}, "sk-trial")


def test_an_agent_is_pointed_where_it_looks() -> None:
    codex = POINTINGS["codex"].agent(ADDRESSES, "policy")
    assert codex == {
        "model_name": "openai/policy",
        "env": {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "sk-trial"},
        "kwargs": {},
    }
    grok = POINTINGS["grok-build"].agent(ADDRESSES, "policy")
    assert grok["kwargs"] == {"grok_config": {"model": {"policy": {"base_url": f"{URL}/v1"}}}}
    near = POINTINGS["terminus-2"].agent(ADDRESSES, "policy")
    assert near["kwargs"] == {"api_base": f"{URL}/v1"}


def test_the_documents_table_is_the_tables() -> None:
    text = (ROOT / "docs/harbor.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("| `")]
    rows = []
    for name, pointing in sorted(POINTINGS.items()):
        names = ", ".join(f"`{each}`" for each in (*pointing.variables, *pointing.kwargs))
        told = (
            f"refused: {pointing.refused} | | |"
            if pointing.refused
            else f"{pointing.dialect} | {names} | {pointing.where} |"
        )
        rows.append(f"| `{name}` | {told}")
    assert [line for line in shown if line.split("`")[1] in POINTINGS] == rows


def task(tmp_path: Path, toml: str, steps: tuple[str, ...] = ()) -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "task.toml").write_text(toml, "utf-8")
    for folder in [tmp_path / "steps" / name for name in steps] or [tmp_path]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "instruction.md").write_text(f"Do {folder.name if steps else 'it'}.")
    return tmp_path


@pytest.mark.parametrize(
    ("toml", "given", "expected"),
    [
        ("", {}, ["shared"]),
        ("", {"artifacts": ["/app"]}, ["separate"]),
        ("", {"verifier": "separate"}, ["separate"]),
        ('artifacts = ["/app"]', {}, ["separate"]),
        ('artifacts = ["/app"]\n[verifier]\nenvironment_mode = "shared"', {"verifier": "separate"}, ["shared"]),
        ('[verifier]\nenvironment_mode = "separate"', {}, ["separate"]),
        ("[verifier.environment]\ncpus = 1", {}, ["separate"]),
        ('[[steps]]\nname = "a"\nartifacts = ["/x"]\n[[steps]]\nname = "b"', {}, ["separate", "shared"]),
        (
            '[verifier]\nenvironment_mode = "separate"\n[[steps]]\nname = "a"\n[steps.verifier]\nenvironment_mode = "shared"\n'
            '[[steps]]\nname = "b"',
            {},
            ["shared", "separate"],
        ),
    ],
)
def test_where_a_verifier_runs(tmp_path: Path, toml: str, given: dict[str, Any], expected: list[str]) -> None:
    steps = tuple(name for name in "ab" if f'name = "{name}"' in toml)
    (found,) = harbor_tasks([task(tmp_path, toml, steps)])
    assert modes(found, RolloutSettings(harbor=str(tmp_path), agent="codex", **given)) == expected
    assert "environment_mode" not in json.dumps(dict(found.fields))


ANY_TOML = r"""
"key with space" = 1
"ünï.cödé" = "x \" \\ \u007f \n \t é 😀"
when = 2026-11-23T10:00:00.5Z
then = 2026-11-23T10:00:00
day = 2026-11-23
at = 10:00:00
mixed = [1, "a", 2.5, true, [1, [2, []]], {a = 1, b = {c = [{d = 1}, {}]}}]
numbers = [1e20, -0.0, inf, -inf, 1e-7, 0xff, 9223372036854775807]
nothing = {}
lines = '''
a
  b'''
[metadata]
tags = [[{a = 1}], [{b = 2}]]
[metadata."a.b"."c d"]
x = 1
[environment]
env = {A = "1", "B C" = "${X}"}
[verifier]
timeout_sec = 5.0
"""


def test_the_task_as_it_is_run_differs_in_what_is_said_of_its_agent_and_where_its_verifier_runs_alone(
    tmp_path: Path,
) -> None:
    """Whatever else its file says, unknown keys among it."""
    source = task(tmp_path / "zwei Schritte é", ANY_TOML)
    driver.derive(source, tmp_path / "run", {"modes": ["separate"], "only_host": "proxy", "timeout_s": 7.5})
    expected = tomllib.loads(ANY_TOML)
    expected["verifier"]["environment_mode"] = "separate"
    expected["agent"] = {"timeout_sec": 7.5, "network_mode": "allowlist", "allowed_hosts": ["proxy"]}
    assert tomllib.loads((tmp_path / "run" / "task.toml").read_text("utf-8")) == expected
    assert (source / "task.toml").read_text("utf-8") == ANY_TOML, "the task's own is as it was"
    assert (tmp_path / "run" / "instruction.md").samefile(source / "instruction.md")


LATE = """#!{python}
import json, sys
from pathlib import Path

text = Path(sys.argv[3]).read_text()
Path("{asked}").write_text(text)
late = {{"exception_type": "AgentTimeoutError", "exception_message": "Agent execution timed out after 5.0 seconds"}}
answer = {{"exception_info": late, "agent_execution": {{}}, "modes": [], "only_host": None, "unreachable": None, "image": None,
          "verifier_result": None, "step_results": None}}
Path(json.loads(text)["answer"]).write_text(json.dumps(answer))
"""
"""A driver of trials whose agent came to no end; `asked` is what it was asked to do."""


async def played_late(tmp_path: Path, toml: str, timeout_s: float | None) -> tuple[dict[str, Any], CommandOutcome]:
    """What the driver of a trial was asked to do, and what came of the trial."""
    steps = tuple(name for name in "ab" if f'name = "{name}"' in toml)
    (found,) = harbor_tasks([task(tmp_path / "task", toml, steps)])
    python = tmp_path / "python"
    python.write_text(LATE.format(python=sys.executable, asked=tmp_path / "asked.json"))
    python.chmod(0o700)
    settings = RolloutSettings(harbor="x", agent="codex", environment="daytona", work_dir=tmp_path, timeout_s=timeout_s)
    plan = HarborPlan(HarborPython(python, "", frozenset(), frozenset()), "codex", None, POINTINGS["codex"])
    session = Session(trial_id="g.0", created_at=0.0, updated_at=0.0, counts=Counts(turns=1))

    async def recorded(_: str) -> Session:
        return session

    client = cast(AsyncClient, SimpleNamespace(session=recorded))
    options = RunnerOptions((), tmp_path, timeout_s=timeout_s)
    player = ExecutorPlayer(client, HarborExecutor(plan, settings), options)
    assignment = Assignment(Trial(session=session, urls=dict(ADDRESSES.urls)), found, "epoch-0")
    async with asyncio.timeout(60):
        _, verdict = await player.play(assignment, tmp_path / "g.0")
    return json.loads((tmp_path / "asked.json").read_text()), verdict


OWN_LIMIT = "[agent]\ntimeout_sec = 7\n"
TWO_STEPS = '[[steps]]\nname = "a"\n[steps.agent]\ntimeout_sec = 5\n[[steps]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("toml", "timeout_s", "limits"),
    [
        ("", None, [3600]),
        (OWN_LIMIT, None, [7]),
        (OWN_LIMIT, 9.0, [9]),
        (TWO_STEPS, None, [5, 3600]),
        (OWN_LIMIT + TWO_STEPS, None, [5, 7]),
        (OWN_LIMIT + TWO_STEPS, 9.0, [9, 9]),
    ],
)
async def test_an_agent_has_a_time_limit_in_each_step(
    tmp_path: Path, toml: str, timeout_s: float | None, limits: list[float]
) -> None:
    request, _ = await played_late(tmp_path, toml, timeout_s)
    driver.derive(tmp_path / "task", tmp_path / "run", request)
    run = tomllib.loads((tmp_path / "run" / "task.toml").read_text("utf-8"))
    own = run.get("agent", {}).get("timeout_sec")
    given = request["config"]["agent"]["override_timeout_sec"]
    # as Harbor reads them (`_compute_agent_timeout_sec`, `_step_agent_timeout_sec`)
    assert [given or part.get("agent", {}).get("timeout_sec", own) for part in run.get("steps", [run])] == limits


async def test_the_limit_that_ended_an_agent_is_told_as_harbor_says_it(tmp_path: Path) -> None:
    """It may be one step's own."""
    _, verdict = await played_late(tmp_path, TWO_STEPS, None)
    assert verdict.reason is EndReason.TIMEOUT
    assert verdict.detail == "AgentTimeoutError: Agent execution timed out after 5.0 seconds"


def test_tasks_of_several_steps_tell_all_their_instructions(tmp_path: Path) -> None:
    (found,) = harbor_tasks([task(tmp_path, '[[steps]]\nname = "a"\n[[steps]]\nname = "b"', ("a", "b"))])
    assert found.fields["instruction"] == "Do a.\n\nDo b." and found.fields["steps"][1]["instruction"] == "Do b."
    assert harbor_folders(tmp_path) == [tmp_path]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec: got -1, must be a number of seconds"),
        ("steps = 3", "steps: must be tables, each with a name"),
        ("x = ", "not valid TOML"),
        ('[[steps]]\nname = "gone"', "no such file"),
    ],
)
def test_a_task_that_is_not_one_is_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match="harbor: ") as refused:
        harbor_tasks([task(tmp_path, toml)])
    assert message in refused.value.message
    with pytest.raises(ConfigError, match="has no task"):
        harbor_folders(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "tasks: missing: give a folder or a file"),
        ({"tasks": ".", "agent": "codex"}, "agent: is for Harbor's tasks"),
        ({"harbor": "x"}, "agent: missing"),
        ({"harbor": "x", "agent": "codex", "tasks": "."}, "tasks: can't be given with harbor"),
        ({"harbor": "x", "agent": "codex", "reward": "a.py:b"}, "reward: can't be given with harbor"),
        ({"harbor": "x", "agent": "codex", "verifiers": "y"}, "verifiers: can't be given with harbor"),
        ({"verifiers": "y", "agent": "codex"}, "agent: is for Harbor's tasks"),
        ({"verifiers": "y", "tasks": "."}, "tasks: can't be given with verifiers"),
        ({"verifiers": "y", "command": ["a"]}, "command: can't be given with verifiers"),
        ({"verifiers": "y", "executor": "docker"}, "executor: got 'docker': with verifiers"),
        ({"tasks": ".", "verifiers_options": {"a": 1}}, "verifiers_options: is for verifiers' tasks"),
        ({"verifiers": "y", "confine": "require"}, "confine: can't be given with verifiers"),
        ({"tasks": ".", "reward_key": "a"}, "reward_key: is for Harbor's tasks"),
        ({"harbor": "x", "agent": "codex", "executor": "podman"}, "executor: got 'podman': with harbor"),
    ],
)
def test_settings_that_do_not_go_together_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RolloutSettings.load(given, None)
    assert message in refused.value.message


def test_what_harbor_wrote_stays_unless_it_is_said_otherwise() -> None:
    assert RolloutSettings(harbor="x", agent="codex").keeps == "all"
    assert RolloutSettings(harbor="x", agent="codex", keep="none").keeps == "none"
    assert RolloutSettings(tasks=Path(), command=["x"]).keeps == "failed"


def test_harbor_s_processes_get_nobody_s_keys_but_those_of_sandboxes(tmp_path: Path) -> None:
    ours = {"STENO_ADMIN_KEY": "a", "OPENAI_API_KEY": "b", "ANTHROPIC_BASE_URL": "c", "CLAUDE_CODE_OAUTH_TOKEN": "d"}
    given = {**ours, "AWS_BEARER_TOKEN_BEDROCK": "e", "PATH": "/bin", "DAYTONA_API_KEY": "f", "DOCKER_HOST": "g"}
    assert environment(given, tmp_path / "bin" / "python") == {
        "PATH": f"{tmp_path}/bin:/bin", "DAYTONA_API_KEY": "f", "DOCKER_HOST": "g", "HARBOR_TELEMETRY": "off",
    }  # fmt: skip


def test_an_interpreter_without_harbor_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"harbor_python: missing, and .* has no Harbor"):
        HarborPython.found(None)
    with pytest.raises(ConfigError, match="no such program"):
        HarborPython.found(tmp_path / "python")
    with pytest.raises(ConfigError, match="No module named 'harbor': it has no Harbor"):
        HarborPython.found(Path(sys.executable))


def test_containers_are_found_by_their_trial() -> None:
    name = harbor_name("run.task.epoch-0.abcdef.0")
    assert len(name) < 30 and name == harbor_name("run.task.epoch-0.abcdef.0") != harbor_name(
        "run.task.epoch-0.abcdef.1"
    )
    assert _project(
        f"1f map[a:b com.docker.compose.project:{name}__verifier__trial com.docker.compose.service:main]"
    ) == (f"{name}__verifier__trial")
    assert _project(f"1f a=b,com.docker.compose.project={name},com.docker.compose.service=main") == name
    assert _project("1f a=b") == ""
