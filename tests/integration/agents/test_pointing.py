"""What `steno env` prints, evaluated by a shell as it stands, takes each agent to its trial and lets it finish."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import shell, urls
from tests.support.programs.stack import Stack, running

pytestmark = pytest.mark.agents

SCRIPT = """
def reply(request):
    if [tool["function"]["name"] for tool in request["tools"]] != ["bash"]:
        return "All done."
    command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent ends no other way
    return {"tool_calls": [{"function": {"name": "bash", "arguments": {"command": command}}}]}
"""
DIALECTS = {
    "claude-code": "messages", "codex": "responses", "opencode": "chat", "mini-swe-agent": "chat", "qwen-code": "chat",
    "gemini-cli": "gemini",
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pointing")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with running(
        folder, ["--engine", "scripted", "--script", f"{script}:reply", "--context-tokens", "300000"]
    ) as stack:
        yield stack


@pytest.mark.parametrize("name", DIALECTS)
def test_an_agent_is_pointed_at_its_trial_by_what_is_printed(name: str, stack: Stack, tmp_path: Path) -> None:
    setup = AGENTS[name].setup(AgentTarget(name, urls(stack.url, name), model="a-model"))
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    for file, content in setup.files.items():
        place = home / file.removeprefix("~/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    programs = f"{os.environ['STENO_AGENTS_NPM']}/node_modules/.bin:{os.environ['STENO_AGENTS_VENV']}/bin"
    done = subprocess.run(
        ["bash", "-c", f"{shell(setup)}TASK='Say that you are done.'\n{setup.command}"],
        cwd=work, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
    turns = stack.turns(name)
    assert {(turn["dialect"], turn["partial"]) for turn in turns} == {(DIALECTS[name], False)}
    assert any("a-model" in turn["model"] for turn in turns)
