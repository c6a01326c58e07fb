"""Gemini CLI from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`). It is pointed at a trial by what
`steno env gemini-cli` prints, its settings file included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import urls
from tests.integration.agents.scripts.gemini_script import STEPS
from tests.integration.agents.support import (
    check_continuous,
    is_fixed,
    main_branch,
    npm_programs,
    output,
    places,
    run,
    scripted,
)
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("scripts") / "gemini_script.py"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with scripted(tmp_path_factory.mktemp("logs"), SCRIPT, 300_000) as stack:
        yield stack


def run_gemini(stack: Stack, trial_id: str, task: str, folder: Path) -> list[dict[str, Any]]:
    """The turns on record. Its work is in `folder/work`."""
    work, home = places(folder, git=True)
    setup = AGENTS["gemini-cli"].setup(AgentTarget(trial_id, urls(stack.url, trial_id)))
    for name, content in setup.files.items():
        file = home / name.removeprefix("~/")
        file.parent.mkdir(parents=True)
        file.write_text(content)
    variables = {"PATH": f"{npm_programs()}:{os.environ['PATH']}", "TASK": task, **setup.variables}
    done = run(setup.command, work, home, variables)
    assert done.returncode == 0, output(done, stack)
    assert done.stdout.rstrip().endswith("All done."), done.stdout
    assert is_fixed(work)
    turns = stack.turns(trial_id)
    check_continuous(turns, "gemini")
    assert {turn["model"] for turn in turns} == {"policy"}
    return turns


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
    assert main == turns and len(main) == 12 and not any(turn["partial"] for turn in turns)
    assert [turn["fork_reason"] for turn in main] == [None] * 12, "what was refused is nothing to be beside of"


def test_a_stream_that_broke_is_on_record_and_asked_again(stack: Stack, tmp_path: Path) -> None:
    turns = run_gemini(stack, "gemini-cut", "CUT once, then fix the bug in src/calc.py", tmp_path)
    main = main_branch(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "error" and len(cut["completion_ids"]) == 60 == cut["delivered"]
    assert cut["parent_id"] == main[2]["turn_id"] and cut not in main, "it asks again, as if nothing had come"
    assert [turn["fork_reason"] for turn in main] == [None] * 3 + ["sibling"] + [None] * 8
