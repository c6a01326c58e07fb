"""Which sessions an export takes, and that it never goes without one that it should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from steno.client import client as client_module
from steno.client.client import Client
from steno.contracts.errors import ConfigError, Conflict, Gone, NotFound, StenoError, Unreachable
from steno.contracts.records import Group
from steno.contracts.runs.leases import GroupPlace
from steno_cli.commands import sessions as command
from steno_cli.exports import export
from steno_cli.exports.export import export_sessions
from steno_cli.exports.selection import Purpose, Selection
from steno_cli.main import app
from tests.support.records.recordings import session

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
        self.trial_ids = {one.trial_id for one in trials}
        self.gone: set[str] = set()
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
            case ["sessions", trial_id] if trial_id in self.trial_ids and trial_id not in self.gone:
                [one] = (one for one in self.trials if one.trial_id == trial_id)
                return httpx.Response(200, content=one.model_dump_json())
            case ["sessions", trial_id] if trial_id in self.gone:
                return httpx.Response(410, json={"error": {"code": "gone", "message": "deleted"}})
            case ["sessions", trial_id, "turns"]:
                return httpx.Response(200, json={"items": [], "next_start": None})
            case ["sessions", trial_id, "samples"] if trial_id in self.trial_ids:
                if trial_id == "got-text-only":
                    return httpx.Response(409, json={"error": {"code": "conflict", "message": "text_only"}})
                return httpx.Response(200, json={"items": [], "unreadable": []})
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
    with pytest.raises(ConfigError, match="--purpose: group gone is not on record, so its purpose is unknown"):
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


RESCORED = [session("lesson.0", group_id="lesson", run_id="r"), session("again.0", run_id="r2", rescore_of="lesson.0")]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, ["lesson.0"]),
        ({"purpose": Purpose.ALL}, ["lesson.0"]),
        ({"run_id": "r2"}, ["lesson.0", "again.0"]),  # the fake proxy lists all runs
    ],
)
def test_turns_that_were_scored_anew_are_exported_once_where_no_run_is_named(
    how: dict[str, Any], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Selection(**how).trial_ids(FakeProxy(*RESCORED).client()) == expected
    words = "left out: 1 sessions that score others anew; --run or --group exports them\n"
    assert capsys.readouterr().err == ("" if "run_id" in how else words)


TEXT_ONLY = session("text", run_id="r", marks=["text_only"], reward=1.0)


@pytest.mark.parametrize("options", [["--format", "sft"], ["--format", "datasets"], ["--records", "samples"]])
def test_sessions_without_token_ids_are_left_out_of_samples_unless_they_are_named(
    connect_to: ConnectTo, tmp_path: Path, options: list[str]
) -> None:
    connect_to(FakeProxy(TRIALS[0], TEXT_ONLY, session("got-text-only", run_id="r")))
    command = ["sessions", "export", *options, "-o"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "out"), "--run", "r"])
    assert done.exit_code == 0, done.exception
    words = "left out: 1 text_only sessions, which have no token ids"
    first, again, total = done.stderr.splitlines()
    assert (first, again) == (words, words) and total.startswith("0 rows of 1 sessions in ")
    assert isinstance(CliRunner().invoke(app, [*command, str(tmp_path / "one"), "got-text-only"]).exception, Conflict)


def test_sessions_without_token_ids_are_exported_as_turns(connect_to: ConnectTo, tmp_path: Path) -> None:
    connect_to(FakeProxy(TEXT_ONLY))
    done = CliRunner().invoke(app, ["sessions", "export", "--run", "r", "-o", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 0 and done.stderr.startswith("0 rows of 1 sessions in ")


@pytest.mark.parametrize("options", [["--records", "sessions"], ["--format", "atif"]])
def test_what_was_deleted_since_it_was_listed_is_left_out_unless_it_is_named(
    connect_to: ConnectTo, tmp_path: Path, options: list[str]
) -> None:
    proxy = FakeProxy(*(session(name, run_id="r") for name in ("a", "b", "c")))
    proxy.gone = {"b"}
    connect_to(proxy)
    command = ["sessions", "export", "-o", str(tmp_path / "out.jsonl"), *options]
    done = CliRunner().invoke(app, [*command, "--run", "r"])
    assert done.exit_code == 0, done.exception
    left, total = done.stderr.splitlines()
    assert left == "left out: 1 deleted meanwhile" and " of 2 sessions in " in total
    assert isinstance(CliRunner().invoke(app, [*command, "b"]).exception, Gone)


def test_a_session_that_goes_while_it_is_exported_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(_: Any, trial_id: str, *__: Any, **___: Any) -> Iterator[dict[str, Any]]:
        yield {"trial_id": trial_id}
        if trial_id == "b":
            raise NotFound("no session b")

    monkeypatch.setattr(export, "_rows", rows)
    left_out = Counter[str]()
    to = tmp_path / "out.jsonl"
    assert export_sessions(FakeProxy().client(), ["a", "b", "c"], to, left_out=left_out) == 2
    assert to.read_text().splitlines() == ['{"trial_id": "a"}', '{"trial_id": "c"}'] and left_out.total() == 1


def test_an_export_goes_on_where_a_proxy_was_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, failed = FakeProxy(TRIALS[0]), []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path not in failed:
            failed.append(request.url.path)
            raise httpx.ConnectError("restarting")
        return proxy.answer(request)

    def connect(*_: Any, retries: int = 0) -> Client:
        return Client("http://proxy", transport=httpx.MockTransport(answer), retries=retries)

    monkeypatch.setattr(command, "connect", connect)
    monkeypatch.setattr(client_module.time, "sleep", lambda _: None)
    done = CliRunner().invoke(app, ["sessions", "export", "--run", "r", "-o", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 0, done.exception
    assert "/sessions" in failed and "/sessions/lesson.0" in failed


@pytest.mark.parametrize(
    "answer", [NotFound("Not Found (request 1)"), Unreachable("no answer from the proxy: HTTP 404 Not Found")]
)
def test_a_404_of_another_port_or_of_what_stands_before_the_proxy_is_no_deleted_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: StenoError
) -> None:
    def rows(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        raise answer
        yield

    monkeypatch.setattr(export, "_rows", rows)
    to = tmp_path / "out.jsonl"
    to.write_text("before")
    with pytest.raises(type(answer)):
        export_sessions(FakeProxy().client(), ["a"], to, left_out=Counter[str]())
    assert to.read_text() == "before"
