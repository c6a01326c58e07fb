"""Claude Code from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agents.claude_script import SUBTASK, SUMMARY, steps
from tests.integration.agents.test_mini_swe_agent import prompt_ids
from tests.support.stack import Stack, running

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("claude_script.py")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    script = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--context-tokens", "200000"]
    with running(tmp_path_factory.mktemp("logs"), script) as stack:
        yield stack


def run_claude(stack: Stack, trial_id: str, task: str, folder: Path, *, goes_on: bool = False) -> dict[str, Any]:
    """What it says at its end. Its work is in `folder/work`. goes_on: with what it did there before."""
    work, home = folder / "work", folder / "home"
    work.mkdir(exist_ok=goes_on)
    home.mkdir(exist_ok=goes_on)
    models = (
        "MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL",
    )  # fmt: skip
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": f"{stack.url}/{trial_id}", "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_SUBAGENT_MODEL": "policy", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
    } | {f"ANTHROPIC_{name}": "policy" for name in models}  # fmt: skip
    claude = Path(os.environ["STENO_AGENTS_NPM"]) / "node_modules/.bin/claude"
    done = subprocess.run(
        [str(claude), "-p", task, "--dangerously-skip-permissions", "--output-format", "json", *["--continue"] * goes_on],
        cwd=work, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
    said: dict[str, Any] = json.loads(done.stdout)
    assert not said["is_error"] and (goes_on or said["result"] == "All done."), said
    assert (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    return said


def branch(turns: list[dict[str, Any]], leaf: dict[str, Any]) -> list[dict[str, Any]]:
    """From the root to this turn."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    path = [leaf]
    while path[-1]["parent_id"]:
        path.append(by_id[path[-1]["parent_id"]])
    return path[::-1]


def main_branch(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [leaf] = [turn for turn in turns if turn["reply"]["content"] == "All done."]
    return branch(turns, leaf)


def check_continuous(turns: list[dict[str, Any]]) -> None:
    """I2, for every turn that continues one, and each streamed answer was read to its end."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    for turn in turns:
        assert turn["dialect"] == "messages"
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))
        if turn["parent_id"]:
            before = by_id[turn["parent_id"]]
            whole = prompt_ids(turns, before) + before["completion_ids"]
            assert prompt_ids(turns, turn)[: len(whole)] == whole


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
    check_continuous(turns)


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
    check_continuous(turns)


def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-refused", "REFUSED once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-refused")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in main)
    [failed] = [turn for turn in turns if turn["partial"]]
    assert (failed["completion_ids"], failed["delivered"], failed["parent_id"]) == ([], 0, main[2]["turn_id"])
    assert failed["error"].startswith("no_worker")
    check_continuous(turns)


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
    check_continuous(turns)


def test_a_stream_that_broke_before_anything_was_closed_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_claude(stack, "claude-early", "CUT once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("claude-early")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in main)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert (cut["parent_id"], len(cut["completion_ids"]), cut["delivered"]) == (main[2]["turn_id"], 5, 5)
    assert [turn["fork_reason"] for turn in main if turn["fork_reason"]] == ["sibling"], "beside what was cut off"
    check_continuous(turns)


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
    check_continuous(turns)


@pytest.mark.parametrize("where", ["in a sentence", "in a CALL"])
def test_an_answer_that_was_cut_off_by_length_is_gone_on_from(stack: Stack, tmp_path: Path, where: str) -> None:
    """It asks for more, or answers the half call, which it sends back as `{"__unparsedToolInput": {"raw": …, "len": …}}`."""
    trial_id = f"claude-length-{where[-4:].lower()}"
    run_claude(stack, trial_id, f"LENGTH {where}, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns(trial_id)
    main = main_branch(turns)
    assert main == turns and [turn["fork_reason"] for turn in main] == [None] * 12
    assert [turn["finish_reason"] for turn in main][3] == "length"
    assert [call["function"]["name"] for call in main[3]["reply"].get("tool_calls", [])] == ["Bash"] * ("CALL" in where)
    check_continuous(turns)
