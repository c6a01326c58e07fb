"""Gemini CLI from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`). It is pointed at a trial by what
`steno env gemini-cli` prints, its settings file included.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno.agents import AGENTS, Target
from steno.commands.env import urls
from tests.integration.agents.gemini_script import STEPS
from tests.integration.agents.test_mini_swe_agent import prompt_ids
from tests.support.stack import Stack, running

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("gemini_script.py")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    script = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--context-tokens", "300000"]
    with running(tmp_path_factory.mktemp("logs"), script) as stack:
        yield stack


def run_gemini(stack: Stack, trial_id: str, task: str, folder: Path) -> list[dict[str, Any]]:
    """The turns on record. Its work is in `folder/work`."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    setup = AGENTS["gemini-cli"].setup(Target(trial_id, urls(stack.url, trial_id)))
    for name, content in setup.files.items():
        file = home / name.removeprefix("~/")
        file.parent.mkdir(parents=True)
        file.write_text(content)
    programs = Path(os.environ["STENO_AGENTS_NPM"]) / "node_modules/.bin"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "dumb",
        "TASK": task,
        **setup.variables,
    }
    done = subprocess.run(
        ["bash", "-c", setup.command],
        cwd=work, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
    assert done.stdout.rstrip().endswith("All done."), done.stdout
    assert (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    turns = stack.turns(trial_id)
    for turn in turns:
        assert (turn["dialect"], turn["model"]) == ("gemini", "policy")
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))
    return turns


def main_branch(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the root to the last answer; each prompt begins with the prompt and the reply before it (I2)."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    [leaf] = [turn for turn in turns if turn["reply"]["content"] == "All done."]
    path = [leaf]
    while path[-1]["parent_id"]:
        path.append(by_id[path[-1]["parent_id"]])
        whole = prompt_ids(turns, path[-1]) + path[-1]["completion_ids"]
        assert prompt_ids(turns, path[-2])[: len(whole)] == whole
    return path[::-1]


def test_a_task_of_a_dozen_turns_is_one_straight_branch(stack: Stack, tmp_path: Path) -> None:
    turns = run_gemini(stack, "gemini-plain", "Fix the bug in src/calc.py", tmp_path)
    assert main_branch(turns) == turns and len(turns) == 12
    assert [turn["fork_reason"] for turn in turns] == [None] * 12
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * 11 + ["stop"]
    assert not any(turn["partial"] for turn in turns)
    assert [turn["delivered"] for turn in turns] == [len(turn["completion_ids"]) for turn in turns]
    called = [[call["function"]["name"] for call in turn["reply"].get("tool_calls", [])] for turn in turns[:-1]]
    assert called == [[name for name, _ in step] for step in STEPS]


def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    turns = run_gemini(stack, "gemini-refused", "REFUSED once, then fix the bug in src/calc.py", tmp_path)
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in main)
    [failed] = [turn for turn in turns if turn["partial"]]
    assert (failed["completion_ids"], failed["delivered"], failed["parent_id"]) == ([], 0, main[2]["turn_id"])
    assert failed["error"].startswith("no_worker")


def test_a_stream_that_broke_is_on_record_and_asked_again(stack: Stack, tmp_path: Path) -> None:
    turns = run_gemini(stack, "gemini-cut", "CUT once, then fix the bug in src/calc.py", tmp_path)
    main = main_branch(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "error" and len(cut["completion_ids"]) == 60 == cut["delivered"]
    assert cut["parent_id"] == main[2]["turn_id"] and cut not in main, "it asks again, as if nothing had come"
    assert [turn["fork_reason"] for turn in main] == [None] * 3 + ["sibling"] + [None] * 8
