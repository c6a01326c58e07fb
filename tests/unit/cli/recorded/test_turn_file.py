"""Sessions of an exported file: as they ended, not as if all had come to a good end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Session, Turn
from steno_cli.exports import export
from steno_cli.exports.export import export_sessions
from steno_cli.exports.json_text import json_text
from steno_cli.recorded.turn_file import TurnFile
from tests.support.records import recordings


class Records:
    """A client that gives these sessions, of one turn each."""

    def __init__(self, *sessions: Session) -> None:
        self._sessions = {session.trial_id: session for session in sessions}

    def session(self, trial_id: str) -> Session:
        return self._sessions[trial_id]

    def turns(self, trial_id: str) -> Iterator[Turn]:
        yield recordings.turn(0)


ROW = {"trial_id": "t", "index": 0, "timings": {"queued": 1.0}, "completion_ids": [1], "new_prompt_ids": [1]}


@pytest.mark.parametrize("name", ["turns.jsonl", "turns.parquet"])
def test_a_session_has_the_status_and_the_marks_that_it_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_write_texts", lambda *_: None)
    given = [
        recordings.session("given-up", status="aborted", group_id="g"),
        recordings.session("by-script", status="completed", reward=1.0, marks=["synthetic"]),
        recordings.session("runs", status="open"),
    ]
    client: Any = Records(*given)
    assert export_sessions(client, [session.trial_id for session in given], tmp_path / name) == 3
    file = TurnFile(tmp_path / name)
    for session in given:
        record = file.sessions[session.trial_id].record
        assert [record[what] for what in ("status", "marks", "reward", "group_id")] == [
            session.status, session.marks, session.reward, session.group_id
        ]  # fmt: skip
        [turn] = file.turns(session.trial_id, 0, 10)
        assert set(turn) == set(Turn.model_fields)


def test_a_file_of_an_older_release_says_neither(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(json.dumps(ROW))
    record = TurnFile(tmp_path / "turns.jsonl").sessions["t"].record
    assert (record["status"], record["marks"]) == ("completed", [])


def test_half_a_surrogate_pair_is_shown_as_unknown_and_the_rest_as_it_is(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "cut \ud83d of \U0001f600 é"}]
    lines = [json_text(ROW | {"messages": messages}), json_text(ROW | {"index": 1, "messages": []})]
    (tmp_path / "turns.jsonl").write_text("\n".join(lines))
    found = TurnFile(tmp_path / "turns.jsonl").turns("t", 0, 10)
    assert found[0]["messages"] == [{"role": "user", "content": "cut \ufffd of \U0001f600 é"}]
    assert found[1]["index"] == 1 and found[1]["messages"] == []


@pytest.mark.parametrize("line", [b'{"trial_id": "\xe9"}', b'{"trial_id": "', b"{}", b"[]", b'{"a": NaN}'])
def test_what_is_no_turn_is_refused_by_its_row(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    with pytest.raises(ConfigError, match=r"turns\.jsonl, row 2: no turn as .*Error: "):
        TurnFile(tmp_path / "turns.jsonl")
