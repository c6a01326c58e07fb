"""Told turns are learnt where they were sampled, and nothing that a model writes keeps a session from being exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from steno.contracts.records import Turn, readable
from steno_cli.exports import export
from steno_cli.exports.atif import trajectories
from steno_cli.exports.chat import conversations
from steno_cli.exports.export import ExportFormat, export_sessions
from tests.support.records.recordings import session as recorded
from tests.unit.cli.exports.test_branches import session

HALF = "cut \ud83d"


def calling(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}]}


def forked() -> list[Turn]:
    told = {"completion_ids": b"", "replayed": 3, "messages": [{"role": "user", "content": "hello"}]}
    return session(("a", None), ("b", "a"), ("c", "b"), a=told, b=told)


def test_a_line_for_fine_tuning_does_not_learn_what_was_told_again() -> None:
    [line] = conversations(forked())
    assert [m["weight"] for m in line["messages"] if m["role"] == "assistant"] == [0, 0, 1]


def test_a_line_for_fine_tuning_does_not_learn_to_stop_where_an_answer_was_cut_off() -> None:
    """At `max_tokens`, which is no partial turn. Services put an end of turn after each message."""
    ends = {name: {"finish_reason": name} for name in ("length", "tool_calls", "stop")}
    [line] = conversations(session(("length", None), ("tool_calls", "length"), ("stop", "tool_calls"), **ends))
    assert [m["weight"] for m in line["messages"] if m["role"] == "assistant"] == [0, 1, 1]


def test_a_trajectory_has_what_was_told_again_as_copied_context() -> None:
    [document] = trajectories(recorded("t"), forked(), [])
    steps = document["steps"]
    assert [step.get("is_copied_context", False) for step in steps] == [True, True, True, True, False]
    assert [step["extra"].get("replayed") for step in steps if "extra" in step] == [3, 3, None]
    assert document["final_metrics"]["total_steps"] == 1
    assert document["final_metrics"]["total_completion_tokens"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": "\\ud83d"}', '{"\\ud83d": 1}', '{"t": NaN}', '{"t": -Infinity}', '{"t": 1e999}', "[" * 200_000,
        '{"a": ' * 500 + "1" + "}" * 500, "[1]", "no JSON",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["t.jsonl", "t.chat", "t.atif", "t.parquet"])
def test_a_call_that_no_file_can_hold_is_exported_as_it_was_sent(
    arguments: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = written(session(("a", None), a={"reply": calling(arguments)}), tmp_path / name, monkeypatch)
    if name == "t.atif":
        [call] = row["steps"][-1]["tool_calls"]
        assert call["arguments"] == {} and call["extra"] == {"arguments_as_sent": arguments}
        return
    reply = row["messages"][-1] if name == "t.chat" else row["reply"]
    assert reply["tool_calls"][0]["function"]["arguments"] == arguments


def test_arguments_that_are_an_object_stay_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = session(("a", None), a={"reply": calling('{"x": "\\ud83d\\ude00 é", "deep": [[1.5]]}')})
    [row] = written(turns, tmp_path / "t.atif", monkeypatch)
    assert row["steps"][-1]["tool_calls"] == [
        {"tool_call_id": "c", "function_name": "look", "arguments": {"x": "😀 é", "deep": [[1.5]]}}
    ]


@pytest.mark.parametrize("name", ["t.jsonl", "t.chat", "t.atif", "t.parquet"])
def test_half_a_surrogate_pair_on_record_is_written_as_an_escape(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older proxies recorded what agents had cut in two."""
    turns = session(("a", None), a={"messages": [{"role": "user", "content": HALF}]})
    [row] = written(turns, tmp_path / name, monkeypatch)
    found = row["steps"][0]["message"] if name == "t.atif" else row["messages"][0]["content"]
    assert found == HALF


def written(turns: list[Turn], to: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is read again of an export of these turns. The file's name says the format."""
    made: dict[str, Any] = {
        ".chat": lambda: conversations(turns),
        ".atif": lambda: iter(trajectories(recorded("t"), turns, [])),
    }
    rows = made.get(to.suffix, lambda: (readable(turn) for turn in turns))
    monkeypatch.setattr(export, "_rows", lambda *_, **__: rows())
    monkeypatch.setattr(export, "_write_texts", lambda *_: None)
    format_of = {".chat": ExportFormat.CHAT, ".atif": ExportFormat.ATIF}
    assert export_sessions(None, ["t"], to, format_of.get(to.suffix)) == 1  # type: ignore[arg-type]
    if to.suffix != ".parquet":
        return [json.loads(line) for line in to.read_text(encoding="utf-8").splitlines()]
    nested = ("reply", "messages")
    return [row | {name: json.loads(row[name]) for name in nested} for row in pq.read_table(to).to_pylist()]
