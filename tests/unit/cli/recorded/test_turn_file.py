"""Sessions of an exported file: as they ended, not as if all had come to a good end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.records import Session, Turn
from steno_cli.exports import export
from steno_cli.exports.export import export_sessions
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
    row = {"trial_id": "t", "index": 0, "timings": {"queued": 1.0}, "completion_ids": [1], "new_prompt_ids": [1]}
    (tmp_path / "turns.jsonl").write_text(json.dumps(row))
    record = TurnFile(tmp_path / "turns.jsonl").sessions["t"].record
    assert (record["status"], record["marks"]) == ("completed", [])
