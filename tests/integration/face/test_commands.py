"""`steno sessions` and the README's own lines, against a real proxy and worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest

from steno.client.client import Client
from steno.contracts.rest import Completion
from tests.support.programs import forked
from tests.support.programs.stack import Stack
from tests.unit.house.test_docs import LINES


@pytest.fixture(scope="module")
def recorded(stack: Stack) -> str:
    """A session with a tool call, its continuation, a branch and a reward."""
    with openai.OpenAI(base_url=stack.base_url("face-1"), api_key="none") as agent:
        tools: Any = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
        messages: Any = [{"role": "user", "content": "please call"}]
        first = agent.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        assert first.tool_calls
        messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.txt"}]
        agent.chat.completions.create(model="m", messages=messages, tools=tools)
        messages[-1] = {**messages[-1], "content": "b.txt"}
        agent.chat.completions.create(model="m", messages=messages, tools=tools)
    with Client(stack.url) as client:
        client.complete("face-1", Completion(reward=0.5))
    return "face-1"


def steno(stack: Stack, *words: str) -> str:
    done = forked.run([sys.executable, "-m", "steno", *words, "--proxy", stack.url])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_list_shows_sessions_with_their_counts(stack: Stack, recorded: str) -> None:
    line = next(line for line in steno(stack, "sessions", "list").splitlines() if recorded in line)
    assert "completed" in line and "0.5" in line and "synthetic" in line
    rows = [
        json.loads(line) for line in steno(stack, "sessions", "list", "--json", "--status", "completed").splitlines()
    ]
    assert recorded in [row["trial_id"] for row in rows]


def test_show_draws_the_tree_with_its_fork(stack: Stack, recorded: str) -> None:
    lines = steno(stack, "sessions", "show", recorded).splitlines()
    assert "completed (completed), reward 0.5" in lines[0]
    assert any("tool_calls" in line and 'ls({"path"' in line for line in lines)
    assert any("fork: diverged" in line for line in lines)
    assert [line.index("#") for line in lines if "#" in line][1:] == [lines[-1].index("#")] * 2


def test_tail_replays_what_is_on_record_and_ends_with_the_session(stack: Stack, recorded: str) -> None:
    events = [json.loads(line) for line in steno(stack, "sessions", "tail", recorded, "--json").splitlines()]
    assert [event["type"] for event in events] == ["turn", "turn", "turn", "completed"]
    assert "reward=0.5" in steno(stack, "sessions", "tail", recorded)


@pytest.mark.parametrize(("records", "count"), [("turns", 3), ("samples", 2), ("sessions", 1)])
def test_jsonl_and_parquet_hold_the_same_records(
    stack: Stack, recorded: str, records: str, count: int, tmp_path: Path
) -> None:
    rows = [
        json.loads(line) for line in steno(stack, "sessions", "export", recorded, "--records", records).splitlines()
    ]
    file = tmp_path / "out.parquet"
    steno(stack, "sessions", "export", recorded, "--records", records, "-o", str(file))
    table = pq.read_table(file).to_pylist()
    assert len(rows) == len(table) == count
    for row, line in zip(rows, table, strict=True):
        assert set(row) == set(line)
        for key, value in row.items():
            if isinstance(line[key], str) and not isinstance(value, str):
                assert json.loads(line[key]) == value, key
            else:
                assert line[key] == value, key


def test_the_readmes_lines_do_what_they_say(stack: Stack, tmp_path: Path) -> None:
    """All curl and `steno sessions` lines of the README in their order, at this proxy instead of port 8000."""
    ran = []
    for page, words in LINES:
        if page != "README.md":
            continue
        here = [word.replace("http://127.0.0.1:8000", stack.url) for word in words]
        if here[0] == "curl":
            done = subprocess.run([*here, "--fail-with-body"], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{words}: {done.stdout}"
            ran.append(json.loads(done.stdout))
        elif here[0].endswith("steno") and here[1] == "sessions":
            steno(stack, *(str(tmp_path / word) if word.endswith(".parquet") else word for word in here[1:]))
    answer, session, turns, samples, completed = ran
    assert answer["choices"][0]["message"]["content"]
    assert session["counts"]["turns"] == len(turns["items"]) == len(samples["items"]) == 1
    assert completed["reward"] == 1.0
