"""OpenCode from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`). It is pointed at a trial as
`steno env opencode` says. The provider that it is told to use comes inside its binary: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import urls
from tests.integration.agents.scripts.opencode_script import SUBTASK, SUMMARY, steps
from tests.integration.agents.support import (
    branch,
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

SCRIPT = Path(__file__).with_name("scripts") / "opencode_script.py"
NOWHERE = "http://127.0.0.1:9"
"""A registry that nobody serves: what would be downloaded fails."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with scripted(tmp_path_factory.mktemp("logs"), SCRIPT) as stack:
        yield stack


def run_opencode(stack: Stack, trial_id: str, task: str, folder: Path, context: int = 200_000) -> list[dict[str, Any]]:
    """The events that it prints. Its work is in `folder/work`."""
    work, home = places(folder, git=True)
    setup = AGENTS["opencode"].setup(AgentTarget(trial_id, urls(stack.url, trial_id), context_tokens=context))
    variables = {
        "PATH": f"{npm_programs()}:{os.environ['PATH']}", "TASK": task, "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "npm_config_registry": NOWHERE, **setup.variables,
    }  # fmt: skip
    done = run(setup.command, work, home, variables)
    assert done.returncode == 0, output(done, stack)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event for event in events if event["type"] == "error"] == []
    assert [event["part"]["text"] for event in events if event["type"] == "text"][-1] == "All done."
    assert is_fixed(work)
    return events


def test_a_task_of_a_dozen_turns_is_one_straight_branch_and_it_is_told_the_right_usage(
    stack: Stack, tmp_path: Path
) -> None:
    events = run_opencode(stack, "opencode-plain", "Fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-plain")
    main = main_branch(turns)
    assert main == turns and len(main) == 12, "no title is asked for"
    assert [turn["fork_reason"] for turn in main] == [None] * 12
    assert [turn["finish_reason"] for turn in main] == ["tool_calls"] * 11 + ["stop"]
    assert not any(turn["partial"] for turn in turns)
    assert [turn["delivered"] for turn in turns] == [len(turn["completion_ids"]) for turn in turns]
    called = [[call["function"]["name"] for call in turn["reply"].get("tool_calls", [])] for turn in main[:-1]]
    assert called == [[name for name, _ in step] for step in steps("")]
    assert all(turn["reply"]["reasoning_content"] == f"Thinking about step {i}." for i, turn in enumerate(main[:-1]))
    check_continuous(turns, "chat")
    said = [event["part"]["tokens"]["total"] for event in events if event["type"] == "step_finish"]
    assert said == [turn["prompt_tokens"] + len(turn["completion_ids"]) for turn in main]


def test_sub_agents_are_roots_of_their_own(stack: Stack, tmp_path: Path) -> None:
    run_opencode(stack, "opencode-delegate", "DELEGATE, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-delegate")
    main = main_branch(turns)
    assert len(main) == 13
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 12
    subs = [branch(turns, turn) for turn in turns if turn["reply"]["content"] == "Nothing unusual."]
    assert [len(sub) for sub in subs] == [len(SUBTASK) + 1] * 2
    for sub in subs:
        assert [turn["fork_reason"] for turn in sub] == ["new_conversation", None, None]
    assert {turn["turn_id"] for sub in subs for turn in sub}.isdisjoint(turn["turn_id"] for turn in main)
    check_continuous(turns, "chat")


def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_opencode(stack, "opencode-refused", "REFUSED once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-refused")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in turns)
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 11, "what was refused is nothing to be beside of"
    check_continuous(turns, "chat")


def test_a_stream_that_broke_is_on_record_with_what_it_had_and_the_task_is_finished(
    stack: Stack, tmp_path: Path
) -> None:
    """The script is slow there: of tokens that come right before an error OpenCode may have read any number.

    It asks again as if nothing had come. From then on its history has what it had read as well: the thinking, and the call as
    aborted.
    """
    run_opencode(stack, "opencode-cut", "CUT once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-cut")
    main = main_branch(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "error" and len(cut["completion_ids"]) == 60 == cut["delivered"]
    assert cut["reply"]["content"] == "Step 3: I run the next command."
    [again] = [turn for turn in turns if turn["fork_reason"] == "sibling"]
    assert {cut["parent_id"], again["parent_id"], main[3]["parent_id"]} == {main[2]["turn_id"]}
    assert again["reply"]["tool_calls"] and cut not in main and again not in main
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 2 + ["assistant_rewritten"] + [None] * 7
    [aborted] = [message for message in main[3]["messages"] if message["content"] == "Tool execution aborted"]
    assert aborted["tool_call_id"] == f"call_{cut['turn_id']}_0"
    check_continuous(turns, "chat")


def test_a_call_that_it_rewrites_is_still_that_call(stack: Stack, tmp_path: Path) -> None:
    """A call of a tool that there is not comes back as one of a tool named `invalid`, under our id."""
    run_opencode(stack, "opencode-broken", "BROKEN call, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-broken")
    main = main_branch(turns)
    assert len(main) == 13 and [turn["fork_reason"] for turn in main[1:]] == [None] * 12
    assert main[6]["reply"]["tool_calls"][0]["function"]["name"] == "no_such_tool"
    assert [turn["options"].get("echoed_as") for turn in main] == [None] * 7 + ["call_ids"] + [None] * 5
    check_continuous(turns, "chat")


def test_a_compaction_is_two_new_roots_and_what_was_before_it_stays(stack: Stack, tmp_path: Path) -> None:
    run_opencode(stack, "opencode-long", "LONG output, then fix the bug in src/calc.py", tmp_path, context=24_000)
    turns = stack.turns("opencode-long")
    before = branch(turns, next(turn for turn in turns if "seq" in str(turn["reply"].get("tool_calls"))))
    assert [turn["fork_reason"] for turn in before[1:]] == [None] * (len(before) - 1)
    summaries = [turn for turn in turns if turn["reply"]["content"] == SUMMARY]
    assert summaries and {turn["fork_reason"] for turn in summaries} == {"new_conversation"}
    [*_, last] = turns
    assert last["reply"]["content"] == "All done."
    assert branch(turns, last)[0]["fork_reason"] in ("history_rewritten", "history_dropped")
    assert all(turn["fork_reason"] for turn in turns[1:] if turn["parent_id"] is None)
    check_continuous(turns, "chat")
