"""Codex from npm, unmodified, through real proxy, worker and engine: a dozen turns, sub-agents, refusals and broken streams.

`STENO_AGENTS_NPM` names the folder that it is installed in (made by `.ci/run`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agents.scripts.codex_script import FIXED, SLOW_THOUGHT, STEPS, SUBTASK, SUMMARY
from tests.integration.agents.support import (
    TASK_S,
    is_answering,
    npm_programs,
    output,
    places,
    prompt_ids,
    run,
    run_and_kill,
    scripted,
)
from tests.support.machine.tcprelay import TcpRelay
from tests.support.programs.stack import Stack
from tests.support.waiting import until

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("scripts") / "codex_script.py"
TASK = "Fix the bug in src/calc.py."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with scripted(tmp_path_factory.mktemp("codex"), SCRIPT) as one:
        yield one


def codex(base_url: str, folder: Path, task: str = TASK, *settings: str, model: str = "policy") -> list[dict[str, Any]]:
    """Run it to its end; returns the events that it printed."""
    done = run([*words(base_url, *settings, model=model), task], *(at := places(folder)), environment(at[1]))
    assert done.returncode == 0, output(done)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def words(base_url: str, *settings: str, model: str = "policy") -> list[str]:
    options = [
        "model_provider=steno", "model_providers.steno.name=steno", f"model_providers.steno.base_url={base_url}",
        "model_providers.steno.env_key=STENO_KEY", 'model_providers.steno.wire_api="responses"', *settings,
    ]  # fmt: skip
    return [
        str(npm_programs() / "codex"), "exec", "--disable", "plugins", "--dangerously-bypass-approvals-and-sandbox",
        "--skip-git-repo-check", "--json", "-m", model, *(word for option in options for word in ("-c", option)),
    ]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    return {"CODEX_HOME": str(home), "STENO_KEY": "none"}


def main_of(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of the main conversation: from the first root on."""
    found: set[str] = set()
    for turn in turns:
        if turn is turns[0] or turn["parent_id"] in found:
            found.add(turn["turn_id"])
    return [turn for turn in turns if turn["turn_id"] in found]


def is_straight(turns: list[dict[str, Any]]) -> None:
    """I2: each turn goes on from the one before, token by token."""
    assert [turn["fork_reason"] for turn in turns] == [None] * len(turns)
    for before, turn in pairwise(turns):
        assert turn["parent_id"] == before["turn_id"]
        whole = prompt_ids(turns, before) + before["completion_ids"]
        assert prompt_ids(turns, turn)[: len(whole)] == whole


def test_a_task_of_a_dozen_turns_is_one_conversation(stack: Stack, tmp_path: Path) -> None:
    events = codex(stack.base_url("plain"), tmp_path)
    assert (tmp_path / "work/src/calc.py").read_text() == FIXED
    turns = stack.turns("plain")
    assert len(turns) == len(STEPS) + 1 > 10
    is_straight(turns)
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * len(STEPS) + ["stop"]
    assert {turn["dialect"] for turn in turns} == {"responses"} and not any(turn["partial"] for turn in turns)
    assert all(turn["delivered"] == len(turn["completion_ids"]) for turn in turns)
    assert turns[-1]["reply"]["reasoning_content"] == "That was the last step."
    usage = next(event["usage"] for event in events if event["type"] == "turn.completed")
    assert usage["output_tokens"] == sum(len(turn["completion_ids"]) for turn in turns)
    assert usage["input_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
    assert usage["reasoning_output_tokens"] == sum(turn["reasoning_tokens"] for turn in turns) > 0


def test_sub_agents_are_roots_of_their_own(stack: Stack, tmp_path: Path) -> None:
    codex(stack.base_url("delegate"), tmp_path, f"{TASK} DELEGATE")
    turns = stack.turns("delegate")
    main = main_of(turns)
    is_straight(main)
    assert len(main) == len(STEPS) + 3
    called = [call["function"]["name"] for turn in main for call in turn["reply"].get("tool_calls", [])]
    assert called.count("multi_agent_v1__spawn_agent") == 2
    others = [turn for turn in turns if turn not in main]
    roots = [turn for turn in others if turn["parent_id"] is None]
    # They begin with the main agent's own system prompt and environment, and diverge there.
    assert [root["fork_reason"] for root in roots] == ["diverged"] * 2
    assert [turn["fork_reason"] for turn in others if turn not in roots] == [None] * (len(others) - 2)
    assert len(others) == 2 * (len(SUBTASK) + 1)


def test_a_refused_request_is_asked_again(stack: Stack, tmp_path: Path) -> None:
    codex(stack.base_url("refused"), tmp_path, f"{TASK} REFUSED")
    turns = stack.turns("refused")
    assert len(turns) == len(STEPS) + 1 and not any(turn["partial"] for turn in turns)
    is_straight(turns)


def test_what_it_keeps_of_a_stream_that_failed_is_recognised(stack: Stack, tmp_path: Path) -> None:
    """`response.failed` in the middle of a call: it asks again with the items that were closed, and goes on from them."""
    codex(stack.base_url("cut"), tmp_path, f"{TASK} CUT")
    turns = stack.turns("cut")
    is_straight(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert (cut["finish_reason"], len(cut["completion_ids"]), cut["delivered"]) == ("error", 60, 60)
    assert cut["reply"]["content"] == "Step 3: I run the next command."
    assert "tool_calls" not in cut["reply"], "the call was not closed: nobody acted on it"
    assert len(turns) == len(STEPS) + 1, "the next turn stands where the failed one would have been asked again"


async def test_what_it_keeps_of_a_connection_that_broke_is_recognised(stack: Stack, tmp_path: Path) -> None:
    async with TcpRelay("127.0.0.1", stack.port) as relay:
        base_url = f"http://127.0.0.1:{relay.port}/torn/v1"
        agent = asyncio.create_task(asyncio.to_thread(codex, base_url, tmp_path, f"{TASK} SLOW"))
        async with asyncio.timeout(TASK_S):
            while not await asyncio.to_thread(is_answering, stack, "torn", SLOW_THOUGHT):
                await asyncio.sleep(0.05)
        seen = relay.passed_bytes
        await until(lambda: relay.passed_bytes > seen)  # the next token: what came before it has passed
        relay.cut()
        await agent
    turns = stack.turns("torn")
    is_straight(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "cancelled" and 0 < cut["delivered"] <= len(cut["completion_ids"])
    assert cut["reply"] == {
        "role": "assistant", "content": "", "reasoning_content": "Thinking about step 3.",
    }  # fmt: skip
    assert turns[turns.index(cut) + 1]["parent_id"] == cut["turn_id"]


def has_written(home: Path, thought: str) -> bool:
    """In the file from which it goes on. The proxy has a thought on record before it tells the agent that it is whole."""
    files = home.glob("sessions/**/*.jsonl")
    lines = (line for file in files for line in file.read_text(errors="replace").splitlines())
    return any('"type":"response_item"' in line and thought in line for line in lines)


def test_killed_in_an_answer_it_goes_on_from_what_it_had(stack: Stack, tmp_path: Path) -> None:
    command = words(stack.base_url("killed"))
    work, home = places(tmp_path)
    task = f"{TASK} SLOW"

    def has_the_thought() -> bool:
        return is_answering(stack, "killed", SLOW_THOUGHT) and has_written(home, SLOW_THOUGHT)

    run_and_kill([*command, task], work, home, environment(home), has_the_thought)
    done = run([*command, "resume", "--last", "Go on."], work, home, environment(home))
    assert done.returncode == 0, output(done)
    turns = stack.turns("killed")
    is_straight(turns)
    [cut] = [turn for turn in turns if turn["partial"]]
    assert cut["finish_reason"] == "cancelled" and 0 < cut["delivered"] <= len(cut["completion_ids"])
    assert cut["reply"] == {"role": "assistant", "content": "", "reasoning_content": "Thinking about step 3."}
    assert turns[turns.index(cut) + 1]["parent_id"] == cut["turn_id"], "from the tokens of what it had whole"


def test_a_compaction_is_a_branch_and_what_follows_it_another(stack: Stack, tmp_path: Path) -> None:
    codex(stack.base_url("compact"), tmp_path, TASK, "model_auto_compact_token_limit=21600")
    turns = stack.turns("compact")
    main = main_of(turns)
    is_straight(main)
    rest = [turn for turn in turns if turn not in main]
    assert rest[0]["reply"]["content"] == SUMMARY
    assert [turn["fork_reason"] for turn in rest] == ["tools_changed", "diverged", None, None]
    assert [turn["parent_id"] is None for turn in rest] == [True, True, False, False]
    assert SUMMARY in rest[1]["messages"][-1]["content"]
    assert not any(turn["partial"] for turn in turns)


def test_free_text_tools_in_namespaces_among_the_items_are_one_conversation_too(stack: Stack, tmp_path: Path) -> None:
    """What it sends for a model that it knows: no `tools`, but an item with them, the main one being custom."""
    codex(stack.base_url("known"), tmp_path, model="gpt-6.1-sol")
    assert (tmp_path / "work/src/calc.py").read_text() == FIXED
    turns = stack.turns("known")
    assert len(turns) == len(STEPS) + 1
    is_straight(turns)
    assert {call["function"]["name"] for turn in turns for call in turn["reply"].get("tool_calls", [])} == {"exec"}
    assert not any(turn["partial"] for turn in turns)
