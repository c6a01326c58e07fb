"""OpenCode from npm, unmodified and headless, through real proxy, worker and engine, streamed.

`STENO_AGENTS_NPM` names the npm prefix that it is installed in (made by `.ci/run`). It is pointed at a trial as
`steno env opencode` says. The provider that it is told to use comes inside its binary: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno.agents import AGENTS, Target
from steno.commands.env import urls
from tests.integration.agents.opencode_script import SUBTASK, SUMMARY, steps
from tests.integration.agents.test_mini_swe_agent import prompt_ids
from tests.support.stack import Stack, running

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("opencode_script.py")
NOWHERE = "http://127.0.0.1:9"
"""A registry that nobody serves: what would be downloaded fails."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    script = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--context-tokens", "200000"]
    with running(tmp_path_factory.mktemp("logs"), script) as stack:
        yield stack


def pointed(stack: Stack, trial_id: str, context: int) -> tuple[dict[str, str], str]:
    """Variables and command, as `steno env` gives them; the model's context is what OpenCode can't find out."""
    setup = AGENTS["opencode"].setup(Target(trial_id, urls(stack.url, trial_id)))
    config = json.loads(setup.variables["OPENCODE_CONFIG_CONTENT"])
    config["provider"]["steno"]["models"]["policy"]["limit"] = {"context": context, "output": 2000}
    return setup.variables | {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, setup.command


def run_opencode(stack: Stack, trial_id: str, task: str, folder: Path, context: int = 200_000) -> list[dict[str, Any]]:
    """The events that it prints. Its work is in `folder/work`."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    variables, command = pointed(stack, trial_id, context)
    programs = Path(os.environ["STENO_AGENTS_NPM"]) / "node_modules/.bin"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "TASK": task,
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "npm_config_registry": NOWHERE, **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=work, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event for event in events if event["type"] == "error"] == []
    assert [event["part"]["text"] for event in events if event["type"] == "text"][-1] == "All done."
    assert (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    return events


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
    """I2, for every turn that continues one."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    for turn in turns:
        assert turn["dialect"] == "chat"
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))
        if turn["parent_id"]:
            before = by_id[turn["parent_id"]]
            whole = prompt_ids(turns, before) + before["completion_ids"]
            assert prompt_ids(turns, turn)[: len(whole)] == whole


def test_a_task_of_a_dozen_turns_is_one_straight_branch(stack: Stack, tmp_path: Path) -> None:
    run_opencode(stack, "opencode-plain", "Fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-plain")
    main = main_branch(turns)
    assert len(main) == 12
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 11
    [title] = [turn for turn in turns if turn not in main]
    assert (title["reply"]["content"], title["parent_id"]) == ("A title", None)
    assert {title["fork_reason"], main[0]["fork_reason"]} == {None, "new_conversation"}
    assert [turn["finish_reason"] for turn in main] == ["tool_calls"] * 11 + ["stop"]
    assert not any(turn["partial"] for turn in turns)
    assert [turn["delivered"] for turn in turns] == [len(turn["completion_ids"]) for turn in turns]
    called = [[call["function"]["name"] for call in turn["reply"].get("tool_calls", [])] for turn in main[:-1]]
    assert called == [[name for name, _ in step] for step in steps("")]
    assert all(turn["reply"]["reasoning_content"] == f"Thinking about step {i}." for i, turn in enumerate(main[:-1]))
    check_continuous(turns)


def test_it_is_told_the_right_usage(stack: Stack, tmp_path: Path) -> None:
    events = run_opencode(stack, "opencode-usage", "Fix the bug in src/calc.py", tmp_path)
    main = main_branch(stack.turns("opencode-usage"))
    said = [event["part"]["tokens"] for event in events if event["type"] == "step_finish"]
    assert [tokens["total"] for tokens in said] == [
        turn["prompt_tokens"] + len(turn["completion_ids"]) for turn in main
    ]


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
    check_continuous(turns)


def test_a_turn_that_was_refused_with_503_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    run_opencode(stack, "opencode-refused", "REFUSED once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-refused")
    main = main_branch(turns)
    assert len(main) == 12 and not any(turn["partial"] for turn in main)
    [failed] = [turn for turn in turns if turn["partial"]]
    assert (failed["completion_ids"], failed["delivered"], failed["parent_id"]) == ([], 0, main[2]["turn_id"])
    assert failed["error"].startswith("no_worker")
    check_continuous(turns)


def test_a_stream_that_broke_is_on_record_with_what_it_had_and_the_task_is_finished(
    stack: Stack, tmp_path: Path
) -> None:
    run_opencode(stack, "opencode-cut", "CUT once, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-cut")
    main = main_branch(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "error" and len(cut["completion_ids"]) == 60 == cut["delivered"]
    assert cut["reply"]["content"] == "Step 3: I run the next command."
    assert cut["parent_id"] == main[2]["turn_id"] and cut not in main, "it asks again, as if nothing had come"
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 2 + ["sibling"] + [None] * 8
    check_continuous(turns)


def test_a_call_that_it_rewrites_is_a_branch_with_that_reason(stack: Stack, tmp_path: Path) -> None:
    """A call of a tool that there is not comes back as one of a tool named `invalid`."""
    run_opencode(stack, "opencode-broken", "BROKEN call, then fix the bug in src/calc.py", tmp_path)
    turns = stack.turns("opencode-broken")
    main = main_branch(turns)
    [broken] = [turn for turn in turns if turn not in main and turn["parent_id"]]
    assert broken["reply"]["tool_calls"][0]["function"]["name"] == "no_such_tool"
    assert broken["parent_id"] == main[5]["turn_id"]
    assert [turn["fork_reason"] for turn in main[1:]] == [None] * 5 + ["assistant_rewritten"] + [None] * 5
    check_continuous(turns)


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
    check_continuous(turns)
