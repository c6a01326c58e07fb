"""Which sessions an export takes, and that it never goes without one that it should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from steno.client.client import Client
from steno.contracts.errors import ConfigError
from steno.contracts.leases import GroupPlace
from steno.contracts.records import Group
from steno_cli.commands import sessions as command
from steno_cli.exports.selection import Purpose, Selection
from steno_cli.main import app
from tests.support.recordings import session

GROUPS = {"lesson": "train", "exam": "eval", "unlisted": "eval"}
TRIALS = [
    session("lesson.0", group_id="lesson", run_id="r", reward=0.0),
    session("exam.0", group_id="exam", run_id="r", reward=1.0),
    session("exam.1", group_id="exam", run_id="r", reward=1.0),
    session("alone", run_id="r", reward=1.0),
]
ConnectTo = Callable[["FakeProxy"], None]


class FakeProxy:
    """Lists sessions and groups. asked: how often each path was. unreadable: trials that the archive can't give."""

    def __init__(self, *trials: Any, unreadable: list[str] | None = None) -> None:
        self.trials, self.unreadable = trials, unreadable or []
        self.asked: Counter[str] = Counter()

    def client(self, **options: Any) -> Client:
        return Client("http://proxy", transport=httpx.MockTransport(self.answer), **options)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked[request.url.path] += 1
        match request.url.path.split("/")[1:]:
            case ["sessions"]:
                group = request.url.params.get("group_id")
                found = [one for one in self.trials if group in (None, one.group_id)]
                items = [one.model_dump(mode="json") for one in found]
                return httpx.Response(200, json={"items": items, "next_cursor": None, "unreadable": self.unreadable})
            case ["groups"]:
                places = [
                    GroupPlace(group_id=name, purpose=purpose, state="over", size=1, ended=1, grants=0).model_dump()
                    for name, purpose in GROUPS.items() if name != "unlisted"
                ]  # fmt: skip
                return httpx.Response(200, json={"items": places})
            case ["groups", name] if name in GROUPS:
                group = Group(group_id=name, size=1, purpose=GROUPS[name], created_at=1.0)  # type: ignore[arg-type]
                return httpx.Response(200, content=group.model_dump_json())
        return httpx.Response(404, json={"error": {"code": "not_found", "message": "no"}})


@pytest.fixture
def connect_to(monkeypatch: pytest.MonkeyPatch) -> ConnectTo:
    def connect(proxy: FakeProxy) -> None:
        monkeypatch.setattr(command, "connect", lambda *_, **__: proxy.client(retries=0))

    return connect


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"run_id": "r"}, ["lesson.0", "alone"]),
        ({}, ["lesson.0", "alone"]),
        ({"purpose": Purpose.TRAIN}, ["lesson.0", "alone"]),
        ({"purpose": Purpose.EVAL}, ["exam.0", "exam.1"]),
        ({"purpose": Purpose.ALL}, ["lesson.0", "exam.0", "exam.1", "alone"]),
        ({"group_id": "exam"}, ["exam.0", "exam.1"]),
        ({"group_id": "exam", "purpose": Purpose.TRAIN}, []),
        ({"best_of_group": True}, ["lesson.0"]),
    ],
)
def test_held_out_trials_are_exported_only_where_they_are_asked_for(how: dict[str, Any], expected: list[str]) -> None:
    assert Selection(**how).trial_ids(FakeProxy(*TRIALS).client()) == expected


def test_what_is_left_out_unasked_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Selection(run_id="r").trial_ids(FakeProxy(*TRIALS).client())
    assert capsys.readouterr().err == "left out: 2 sessions of evaluation groups; --purpose eval or all exports them\n"
    Selection(run_id="r", purpose=Purpose.TRAIN).trial_ids(FakeProxy(*TRIALS).client())
    assert capsys.readouterr().err == ""


def test_a_runs_groups_are_asked_for_once_and_one_that_is_not_listed_once() -> None:
    unlisted = [session(f"unlisted.{n}", group_id="unlisted", run_id="r") for n in range(3)]
    proxy = FakeProxy(*TRIALS, *unlisted)
    assert Selection(purpose=Purpose.EVAL).trial_ids(proxy.client())[2:] == [one.trial_id for one in unlisted]
    assert proxy.asked == {"/sessions": 1, "/groups": 1, "/groups/unlisted": 1}
    proxy.asked.clear()
    Selection(purpose=Purpose.ALL).trial_ids(proxy.client())
    assert proxy.asked == {"/sessions": 1}


def test_a_group_of_which_nothing_is_known_is_not_taken_for_training_data() -> None:
    client = FakeProxy(session("gone.0", group_id="gone", run_id="r")).client()
    with pytest.raises(ConfigError, match="--purpose: group gone is not on record, so it may have been an evaluation"):
        Selection(run_id="r").trial_ids(client)
    assert Selection(run_id="r", purpose=Purpose.ALL).trial_ids(client) == ["gone.0"]


def test_an_export_fails_where_the_archive_can_not_give_a_session(connect_to: ConnectTo, tmp_path: Path) -> None:
    proxy = FakeProxy(*TRIALS, unreadable=["old.1", "old.2"])
    connect_to(proxy)
    done = CliRunner().invoke(app, ["sessions", "export", "--run", "r", "-o", str(tmp_path / "t.jsonl")])
    assert done.exit_code != 0 and "old.1, old.2" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_list_names_on_stderr_what_the_archive_can_not_give(connect_to: ConnectTo, options: list[str]) -> None:
    connect_to(FakeProxy(TRIALS[0], unreadable=["old.1", "old.2"]))
    done = CliRunner().invoke(app, ["sessions", "list", *options])
    assert done.exit_code == 0 and "lesson.0" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["old.1", "old.2"]
    connect_to(FakeProxy(unreadable=["old.1"]))
    assert CliRunner().invoke(app, ["sessions", "list", *options]).stderr.count("\n") == 1, "there are sessions"
