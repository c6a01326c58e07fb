"""Claude Code from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import urls
from tests.integration.agents.scripts.claude_script import SLOW_THOUGHT, SUBTASK, SUMMARY, steps
from tests.integration.agents.support import (
    branch,
    check_continuous,
    check_forked,
    errors_of,
    fork,
    is_answering,
    is_fixed,
    main_branch,
    npm_programs,
    output,
    places,
    run,
    run_and_kill,
    scripted,
)
from tests.support.programs.stack import Stack

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("scripts") / "claude_script.py"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with scripted(tmp_path_factory.mktemp("logs"), SCRIPT) as stack:
        yield stack


def pointed(stack: Stack, trial_id: str, task: str) -> tuple[str, dict[str, str]]:
    setup = AGENTS["claude-code"].setup(AgentTarget(trial_id, urls(stack.url, trial_id)))
    return setup.command, {"PATH": f"{npm_programs()}:{os.environ['PATH']}", "TASK": task, **setup.variables}


def run_claude(
    stack: Stack, trial_id: str, task: str, folder: Path, *, goes_on: bool = False, **more: str
) -> dict[str, Any]:
    """What it says at its end. Its work is in `folder/work`. goes_on: with what it did there before. more: variables."""
    work, home = places(folder, goes_on=goes_on)
    command, variables = pointed(stack, trial_id, task)
    done = run(command + " --continue" * goes_on, work, home, variables | more)
    assert done.returncode == 0, output(done, stack)
    said: dict[str, Any] = json.loads(done.stdout)
    assert not said["is_error"] and (goes_on or said["result"] == "All done."), said
    assert is_fixed(work)
    return said


def tools_of(turn: dict[str, Any]) -> set[str]:
    return {tool["function"]["name"] for tool in turn["tools"]}


def test_a_task_of_a_dozen_turns_is_one_straight_branch(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-plain", "Fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-plain")
    main = main_branch(turns)
    assert len(main) == 12
    assert [turn["fork_reason"] for turn in main] == [None] * 12
    assert all(turn["parent_id"] is None or turn in main for turn in turns), "what is not main is a root of its own"
    assert [turn["finish_reason"] for turn in main] == ["tool_calls"] * 11 + ["stop"]
    assert not any(turn["partial"] for turn in turns)
    assert [turn["delivered"] for turn in turns] == [len(turn["completion_ids"]) for turn in turns]
    called = [[call["function"]["name"] for call in turn["reply"].get("tool_calls", [])] for turn in main[:-1]]
    assert called == [[name for name, _ in step] for step in steps("")]
    assert all(turn["reply"]["reasoning_content"] == f"Thinking about step {i}." for i, turn in enumerate(main[:-1]))
    offered = tools_of(main[0])
    assert {"Bash", "WebFetch", "NotebookEdit"} <= offered, "all of its tools, from the start"
    assert offered.isdisjoint({"ToolSearch", "DeferredToolPlaceholder", "WebSearch"})
    check_continuous(turns, "messages")


def test_a_tool_that_it_looks_for_is_offered_from_then_on(stack: Stack, tmp_path: Path) -> None:
    """As it does it by itself, not pointed as `steno env` says: what it finds is a root, since tools are told of first."""
    task = "SEARCH for a tool, then fix the bug in src/calc.py"
    run_claude(stack, "claude-search", task, tmp_path, ENABLE_TOOL_SEARCH="true")
    turns = stack.turns("claude-search")
    assert [turn["fork_reason"] for turn in turns] == [None] * 4 + ["tools_changed"] + [None] * 8
    assert turns[4]["messages"][-1]["content"] == "Tools that can be called now: NotebookEdit"
    before, after = tools_of(turns[3]), tools_of(turns[4])
    assert "ToolSearch" in before and "DeferredToolPlaceholder" not in before | after
    assert after - before == {"NotebookEdit"}
    check_continuous(turns, "messages")


def test_sub_agents_that_run_at_the_same_time_are_roots_of_their_own(stack: Stack, tmp_path: Path) -> None:
    said = run_claude(stack, "claude-delegate", "DELEGATE, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-delegate")
    main = main_branch(turns)
    assert len(main) == 13
    assert [turn["fork_reason"] for turn in main] == [None] * 13
    subs = [branch(turns, turn) for turn in turns if turn["reply"]["content"] == "Nothing unusual."]
    assert said["subagent_stats"]["completed"] == len(subs) == 2
    for sub in subs:
        assert len(sub) == len(SUBTASK) + 1
        assert [turn["fork_reason"] for turn in sub] == ["new_conversation", None, None]
    assert {turn["turn_id"] for sub in subs for turn in sub}.isdisjoint(turn["turn_id"] for turn in main)
    assert not any(turn["partial"] for turn in turns)
    check_continuous(turns, "messages")


def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-refused", "REFUSED once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-refused")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in turns)
    assert [turn["fork_reason"] for turn in main] == [None] * 12, "what was refused is nothing to be beside of"
    check_continuous(turns, "messages")


def test_what_it_keeps_of_a_stream_that_broke_is_recognised(stack: Stack, tmp_path: Path) -> None:
    """I3: it keeps the blocks that were closed, and goes on from them; so does the record, from the very tokens."""
    run_claude(stack, "claude-late", "CUT once, LATE, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-late")
    main = main_branch(turns)
    assert [turn["fork_reason"] for turn in main] == [None] * len(main)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut in main and cut is not main[-1]
    assert cut["finish_reason"] == "error" and len(cut["completion_ids"]) == 60 == cut["delivered"]
    assert cut["reply"]["content"] == "Step 3: I run the next command."
    assert "tool_calls" not in cut["reply"], "the call was not closed: nobody acted on it"
    check_continuous(turns, "messages")


def test_a_stream_that_broke_before_anything_was_closed_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-early", "CUT once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-early")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in main)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert (cut["parent_id"], len(cut["completion_ids"]), cut["delivered"]) == (main[2]["turn_id"], 5, 5)
    assert [turn["fork_reason"] for turn in main if turn["fork_reason"]] == ["sibling"], "beside what was cut off"
    check_continuous(turns, "messages")


def test_killed_in_an_answer_it_goes_on_in_words_of_its_own(stack: Stack, tmp_path: Path) -> None:
    """It had its thinking whole and leaves it out: an answer of its own stands there when it goes on, as the record says."""
    command, variables = pointed(stack, "claude-killed", "SLOW once, then fix the bug in src/calc.py")
    run_and_kill(command, *places(tmp_path), variables, lambda: is_answering(stack, "claude-killed", SLOW_THOUGHT))
    run_claude(stack, "claude-killed", "Go on.", tmp_path, goes_on=True)
    turns = stack.turns("claude-killed")
    main = main_branch(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "cancelled" and 0 < cut["delivered"] <= len(cut["completion_ids"])
    assert cut["reply"] == {"role": "assistant", "content": "", "reasoning_content": "Thinking about step 3."}
    assert cut["superseded_by"] is None and cut["parent_id"] == main[3]["parent_id"]
    assert [turn["fork_reason"] for turn in main if turn["fork_reason"]] == ["assistant_rewritten"]
    check_continuous(turns, "messages")


def test_a_compaction_is_a_branch_and_what_follows_it_a_root(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-compact", "Fix the bug in src/calc.py", tmp_path)
    run_claude(stack, "claude-compact", "/compact", tmp_path, goes_on=True)
    said = run_claude(stack, "claude-compact", "Is it?", tmp_path, goes_on=True)
    assert said["result"] == "Still done."
    turns = stack.turns("claude-compact")
    main = main_branch(turns)
    assert [turn["fork_reason"] for turn in main] == [None] * 12
    summaries = [turn for turn in turns if SUMMARY in turn["reply"]["content"]]
    assert [branch(turns, turn)[:-1] for turn in summaries] == [main[:11]], (
        "from what was said before, its tokens and all"
    )
    [after] = [turn for turn in turns if turn["reply"]["content"] == "Still done."]
    assert after["parent_id"] is None and after["fork_reason"] == "history_rewritten"
    assert len(turns) == 14 and not any(turn["partial"] for turn in turns)
    check_continuous(turns, "messages")


@pytest.mark.parametrize("where", ["in a sentence", "in a CALL"])
def test_an_answer_that_was_cut_off_by_length_is_gone_on_from(stack: Stack, tmp_path: Path, where: str) -> None:
    """It asks for more, or answers the half call, which it is told of as `{"__unparsedToolInput": "…"}`."""
    trial_id = f"claude-length-{where[-4:].lower()}"
    run_claude(stack, trial_id, f"LENGTH {where}, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns(trial_id)
    main = main_branch(turns)
    assert main == turns and [turn["fork_reason"] for turn in main] == [None] * 12
    assert [turn["finish_reason"] for turn in main][3] == "length"
    assert [call["function"]["name"] for call in main[3]["reply"].get("tool_calls", [])] == ["Bash"] * ("CALL" in where)
    check_continuous(turns, "messages")


def test_a_fork_in_a_fresh_folder_is_told_what_was_recorded_and_goes_on_from_it(stack: Stack, tmp_path: Path) -> None:
    """Replies name files as they were recorded, by the first folder: that path leads to the fresh one."""
    (tmp_path / "one").mkdir()
    run_claude(stack, "claude-origin", "Fix the bug in src/calc.py", tmp_path / "one")
    origin = stack.turns("claude-origin")
    last = main_branch(origin)[6]
    fork(stack, "claude-origin", last, "claude-fork")
    shutil.rmtree(tmp_path / "one/work")
    (tmp_path / "one/work").symlink_to(tmp_path / "two/work")
    work, home = tmp_path / "two/work", tmp_path / "two/home"
    for place in (work, home):
        place.mkdir(parents=True)
    command, variables = pointed(stack, "claude-fork", "Fix the bug in src/calc.py")
    done = run(command, work, home, variables)
    assert done.returncode == 0, errors_of(stack, "claude-fork") + output(done, stack)
    turns = stack.turns("claude-fork")
    main = main_branch(turns)
    assert is_fixed(work)
    assert [turn["replayed"] is not None for turn in main] == [True] * 7 + [False] * 5
    check_forked(origin, turns, last)
    check_continuous(turns, "messages")
