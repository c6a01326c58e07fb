"""The tables of `steno sessions list`, `runs list`, `groups list` and `runs show`, however narrow the terminal is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from steno.client.client import Client
from steno.contracts.records import Session
from steno.contracts.runs.leases import EvalGroups, GroupPlace, NotTrained, RunGroups, RunSummary, RunView
from steno_cli.commands import runs as runs_command
from steno_cli.commands.sessions import print_table, table_of
from steno_cli.main import app
from tests.support.records.recordings import session

WIDTHS = pytest.mark.parametrize("columns", ["20", "80", ""])
"""Of a terminal; "": a pipe that says nothing."""


@pytest.fixture(autouse=True)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = request.node.callspec.params.get("columns", "80") if hasattr(request.node, "callspec") else "80"
    monkeypatch.setenv("COLUMNS", columns)


def drawn(sessions: list[Session], capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(table_of(sessions, sessions[0].updated_at + 60.0))
    return capsys.readouterr().out.splitlines()


def test_a_trial_that_is_scored_later_awaits_its_reward(capsys: pytest.CaptureFixture[str]) -> None:
    ended = [
        session("g.0", status="completed", awaits_reward=True),
        session("g.1", status="completed"),
        session("g.2", reward=0.0),
    ]
    assert [row.split()[4] for row in drawn(ended, capsys)[1:]] == ["awaited", "-", "0"]


@WIDTHS
def test_trial_ids_and_numbers_stay_whole(columns: str, capsys: pytest.CaptureFixture[str]) -> None:
    group = "greet.morning.epoch-3.52d2287a4b" + "." + "x" * 60
    header, *rows = drawn([session(f"{group}.{number}", group_id=group, reward=0.125) for number in (0, 1)], capsys)
    assert header.split() == ["trial", "status", "turns", "tokens", "reward", "updated"]
    assert [row.split() for row in rows] == [
        [f"{group}.{number}", "open", "0", "0", "0.125", "1", "min", "ago"] for number in (0, 1)
    ]


@WIDTHS
def test_groups_that_trials_do_not_name_and_marks_have_columns(
    columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "g" * 100
    marked = session("a", group_id=group, marks=["text_only", "synthetic"])
    header, *rows = drawn([marked, session("b")], capsys)
    assert header.split() == ["trial", "status", "group", "turns", "tokens", "reward", "updated", "marks"]
    assert [row.split()[:3] for row in rows] == [["a", "open", group], ["b", "open", "-"]]
    assert rows[0].split()[-2:] == ["text_only", "synthetic"]


RUN, GROUP, VERSION, TRAINER = "run-" + "r" * 60, "group-" + "g" * 60, "lineage-" + "l" * 30 + "/12345", "t" * 50
TOKENS = 123_456_789_012
REASONS = [reason.value for reason in NotTrained]
ANSWERS: dict[str, Any] = {
    "/runs": [RunSummary(run_id=RUN, groups=RunGroups(running=1_000_001), last_group_at=1.0)],
    "/groups": [
        GroupPlace(
            group_id=GROUP, purpose="train", state="leased", size=1_000_000, ended=999_999, grants=1, trainer=TRAINER
        )
    ],
    f"/runs/{RUN}": RunView(
        run_id=RUN, groups=RunGroups(used=1_000_002), eval_groups=EvalGroups(ended=1_000_003),
        sampled={VERSION: 9 * TOKENS}, borrowed={VERSION: 1}, not_trained={name: {VERSION: TOKENS} for name in REASONS},
    ),
}  # fmt: skip


@WIDTHS
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["runs", "list"], [RUN, "1000001"]),
        (["groups", "list", RUN], [GROUP, "999999/1000000", TRAINER]),
        (["runs", "show", RUN], ["1000002", "1000003", VERSION, *REASONS, *["123,456,789,012"] * 8, "123,456,789,013"]),
    ],
)
def test_what_is_said_of_runs_and_groups_stays_whole(
    columns: str, command: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        found = ANSWERS[request.url.path]
        if isinstance(found, list):
            return httpx.Response(200, json={"items": [one.model_dump(mode="json") for one in found]})
        return httpx.Response(200, content=found.model_dump_json())

    def connect(*_: Any) -> Client:
        return Client("http://proxy", transport=httpx.MockTransport(answer), retries=0)

    monkeypatch.setattr(runs_command, "connect", connect)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception
    said = done.stdout.split()
    for word in words:
        said.remove(word)
