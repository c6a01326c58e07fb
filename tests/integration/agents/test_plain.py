"""Agents that nothing here was made for, unmodified and headless, through real proxy, worker and engine: a task is one straight
branch, a refusal is waited out, and what had come of a broken answer is on record.

`STENO_AGENTS_NPM` and `STENO_AGENTS_VENV` name where they are installed (made by `.ci/run`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import urls
from tests.integration.agents.scripts.plain_script import COMMANDS, CUT_TOKENS
from tests.integration.agents.support import (
    Turn,
    check_continuous,
    npm_programs,
    output,
    places,
    run,
    scripted,
)
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.agents

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Kind:
    """name: in `steno env`. command: in place of the one that it prints. asks_again: after a stream that broke."""

    name: str
    dialect: str
    asks_again: bool
    command: str = ""


KINDS = [
    Kind("qwen-code", "chat", asks_again=True),
    Kind("pi", "chat", asks_again=True),
    Kind("openai-agents", "responses", asks_again=False, command=f'python "{SCRIPTS / "agents_sdk_program.py"}"'),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with scripted(tmp_path_factory.mktemp("logs"), SCRIPTS / "plain_script.py") as stack:
        yield stack


def run_kind(stack: Stack, kind: Kind, trial_id: str, task: str, folder: Path) -> subprocess.CompletedProcess[str]:
    work, home = places(folder, git=True)
    setup = AGENTS["openai" if kind.command else kind.name].setup(AgentTarget(trial_id, urls(stack.url, trial_id)))
    for file, content in setup.files.items():
        place = home / file.removeprefix("~/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    programs = f"{os.environ['STENO_AGENTS_VENV']}/bin:{npm_programs()}:{os.environ['PATH']}"
    variables = {"PATH": programs, "TASK": task, **setup.variables}
    return run(kind.command or setup.command, work, home, variables)


def check_straight(turns: list[Turn], kind: Kind) -> None:
    assert len(turns) == len(COMMANDS) + 1
    assert [turn["parent_id"] for turn in turns] == [None] + [turn["turn_id"] for turn in turns[:-1]]
    assert not any(turn["partial"] for turn in turns)
    assert [turn["delivered"] for turn in turns] == [len(turn["completion_ids"]) for turn in turns]
    called = [len(turn["reply"].get("tool_calls", [])) for turn in turns]
    assert called == [len(commands) for commands in COMMANDS] + [0]
    check_continuous(turns, kind.dialect)


@kinds
def test_a_task_of_a_dozen_turns_is_one_straight_branch(stack: Stack, tmp_path: Path, kind: Kind) -> None:
    trial_id = f"{kind.name}-plain"
    done = run_kind(stack, kind, trial_id, "Fix the bug in src/calc.py", tmp_path)
    assert done.returncode == 0 and "All done." in done.stdout, output(done, stack)
    turns = stack.turns(trial_id)
    check_straight(turns, kind)
    assert [turn["fork_reason"] for turn in turns] == [None] * len(turns)


@kinds
def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path, kind: Kind) -> None:
    trial_id = f"{kind.name}-refused"
    done = run_kind(stack, kind, trial_id, "REFUSED once: fix the bug in src/calc.py", tmp_path)
    assert done.returncode == 0, output(done, stack)
    check_straight(stack.turns(trial_id), kind)


@kinds
def test_what_had_come_of_an_answer_that_broke_is_on_record(stack: Stack, tmp_path: Path, kind: Kind) -> None:
    trial_id = f"{kind.name}-cut"
    done = run_kind(stack, kind, trial_id, "CUT once: fix the bug in src/calc.py", tmp_path)
    turns = stack.turns(trial_id)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert (cut["finish_reason"], cut["reply"]["content"]) == ("error", "Step 3: I run the next command.")
    assert len(cut["completion_ids"]) == CUT_TOKENS
    others = [turn for turn in turns if turn is not cut]
    assert cut["parent_id"] == others[2]["turn_id"]
    assert (done.returncode == 0) is kind.asks_again, output(done, stack)
    assert len(others) == (len(COMMANDS) + 1 if kind.asks_again else 3)
    check_continuous(turns, kind.dialect)
