"""The tables of `steno sessions list` and the like, on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from steno.contracts.records import Session
from steno_cli.commands.sessions import table_of
from tests.support.recordings import session


def drawn(sessions: list[Session]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table_of(sessions, sessions[0].updated_at + 60.0))
    return out.getvalue().splitlines()


def test_trial_ids_stay_whole_on_a_narrow_terminal() -> None:
    group = "greet.morning.epoch-3.52d2287a4b"
    header, *rows = drawn([session(f"{group}.{number}", group_id=group, reward=1.0) for number in (0, 1)])
    assert header.split() == ["trial", "status", "turns", "tokens", "reward", "updated"]
    assert [row.split() for row in rows] == [
        [f"{group}.{number}", "open", "0", "0", "1", "1", "min", "ago"] for number in (0, 1)
    ]


def test_groups_that_trials_do_not_name_and_marks_have_columns() -> None:
    header, *rows = drawn([session("a", group_id="g", marks=["text_only"]), session("b")])
    assert header.split() == ["trial", "status", "group", "turns", "tokens", "reward", "updated", "marks"]
    assert [row.split()[:3] for row in rows] == [["a", "open", "g"], ["b", "open", "-"]]
    assert rows[0].endswith("text_only")
