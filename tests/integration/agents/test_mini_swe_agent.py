"""mini-swe-agent from PyPI, unmodified, through real proxy, worker and engine: ten tool calls, one exact conversation.

`STENO_AGENTS_VENV` names the virtual environment it is installed in (made by `.ci/run`).
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import urls
from tests.integration.agents.scripts.mini_script import COMMANDS
from tests.integration.agents.support import check_forked, fork, is_fixed, output, prompt_ids, run, scripted
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("scripts") / "mini_script.py"


def run_mini(
    stack: Stack, trial_id: str, folder: Path, task: str = "Fix the bug in src/calc.py"
) -> subprocess.CompletedProcess[str]:
    home = folder / "home"
    home.mkdir()
    setup = AGENTS["mini-swe-agent"].setup(AgentTarget(trial_id, urls(stack.url, trial_id)))
    programs = Path(os.environ["STENO_AGENTS_VENV"]) / "bin"
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "TASK": task, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return run(setup.command, folder, home, path | setup.variables)


def test_an_unmodified_mini_swe_agent_finishes_ten_tool_calls_and_every_token_is_on_record(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with scripted(tmp_path / "logs", SCRIPT, 100_000) as stack:
        done = run_mini(stack, "mini-1", work)
        assert done.returncode == 0, output(done, stack)
        assert is_fixed(work)
        session = stack.get("/sessions/mini-1")
        turns = stack.turns("mini-1")
    assert session["counts"]["turns"] == len(turns) == len(COMMANDS)
    assert "synthetic" in session["marks"]
    assert [turn["fork_reason"] for turn in turns] == [None] * len(turns)
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * len(turns)
    for before, turn in itertools.pairwise(turns):
        assert turn["parent_id"] == before["turn_id"]
        whole = prompt_ids(turns, before) + before["completion_ids"]
        assert prompt_ids(turns, turn)[: len(whole)] == whole  # I2
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))


def test_a_turn_that_was_refused_with_503_is_asked_again(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with scripted(tmp_path / "logs", SCRIPT, 100_000) as stack:
        done = run_mini(stack, "refused", work, "Fix the bug in src/calc.py REFUSED")
        assert done.returncode == 0, output(done, stack)
        turns = stack.turns("refused")
    assert is_fixed(work) and len(turns) == len(COMMANDS)
    assert [(turn["partial"], turn["fork_reason"]) for turn in turns] == [(False, None)] * len(turns)


def test_an_answer_that_broke_is_asked_again_and_only_the_good_one_is_trained(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with scripted(tmp_path / "logs", SCRIPT, 100_000) as stack:
        done = run_mini(stack, "cut", work, "Fix the bug in src/calc.py CUT")
        assert done.returncode == 0, output(done, stack)
        turns = stack.turns("cut")
    assert is_fixed(work)
    [failed] = [turn for turn in turns if turn["partial"]]
    assert failed["error"].startswith("engine_failed") and len(failed["completion_ids"]) == 12
    assert failed["delivered"] == 0, "an answer in one piece is delivered whole or not at all"
    main = [turn for turn in turns if turn is not failed]
    assert len(main) == len(COMMANDS)
    assert [turn["parent_id"] for turn in main[1:]] == [turn["turn_id"] for turn in main[:-1]]
    again = main[3]
    assert (again["retry_of"], failed["superseded_by"]) == (failed["turn_id"], again["turn_id"])


def test_a_fork_in_a_fresh_folder_is_told_what_was_recorded_and_goes_on_from_it(tmp_path: Path) -> None:
    """Dates, times and the folder are others in what it asks (`pwd`, `ls -la`); the ids are the same."""
    with scripted(tmp_path / "logs", SCRIPT, 100_000) as stack:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        done = run_mini(stack, "one", tmp_path / "one")
        assert done.returncode == 0, output(done, stack)
        origin = stack.turns("one")
        fork(stack, "one", origin[5], "two")
        done = run_mini(stack, "two", tmp_path / "two")
        assert done.returncode == 0, output(done, stack)
        turns, session = stack.turns("two"), stack.get("/sessions/two")
    assert is_fixed(tmp_path / "two"), "each command was carried out there"
    assert [turn["replayed"] is not None for turn in turns] == [True] * 6 + [False] * (len(COMMANDS) - 6)
    check_forked(origin, turns, origin[5])
    assert session["fork_of"]["turn_id"] == origin[5]["turn_id"]
    assert session["counts"]["completion_tokens"] == sum(len(turn["completion_ids"]) for turn in turns[6:])
