"""The conversation tree in a terminal: a straight conversation is flat, a branch indents, everything recorded is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from steno.contracts.records import Counts, ForkReason, Session, Timings, Turn, floats_to_bytes, ids_to_bytes
from steno_cli.commands import sessions
from steno_cli.main import app
from steno_cli.terminal.tree import conversation_tree, headline, turn_line

SESSION = Session(trial_id="t", created_at=1.0, updated_at=1.0)


def turn(number: int, parent: int | None = None, **fields: Any) -> Turn:
    name = {None: None}.get(parent, f"{parent:012x}" if parent is not None else None)
    return Turn(turn_id=f"{number:012x}", parent_id=name, index=number, timings=Timings(queued=1.0), **fields)


def drawn(turns: list[Turn]) -> list[str]:
    console = Console(width=200, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(conversation_tree(SESSION, turns))
    return [line.rstrip() for line in capture.get().splitlines()]


def indents(turns: list[Turn]) -> list[int]:
    return [line.index("#") for line in drawn(turns)[1:]]


def test_turns_that_follow_each_other_stand_below_each_other() -> None:
    assert len(set(indents([turn(0), *(turn(n, n - 1) for n in range(1, 50))]))) == 1


def test_a_branch_indents_below_its_parent_in_commit_order() -> None:
    turns = [turn(0), turn(1, 0), turn(2, 0), turn(3, 1), turn(4)]
    lines = drawn(turns)[1:]
    assert [line.split("#")[1].split()[0] for line in lines] == ["0", "1", "3", "2", "4"]
    first, *rest = indents(turns)
    assert rest == [first + 4, first + 4, first + 4, first]


def test_a_session_of_thousands_of_turns_is_drawn() -> None:
    assert len(drawn([turn(0), *(turn(n, n - 1) for n in range(1, 3000))])) == 3001


def test_a_turn_says_its_tokens_its_end_and_what_is_odd_about_it() -> None:
    line = turn_line(
        turn(
            3,
            2,
            new_prompt_ids=ids_to_bytes([1, 2, 3]),
            completion_ids=ids_to_bytes([4, 5]),
            sampling_logprobs=floats_to_bytes([-1.0, -0.5]),
            fork_reason=ForkReason.DIVERGED,
            finish_reason="length",
            partial=True,
            constrained=[(0, 1)],
            reply={"tool_calls": [{"function": {"name": "ls", "arguments": "[bold]{}"}}], "content": "a\n b"},
        )
    ).plain
    for words in ("+3 → 2 tokens", "length", "mean logprob -0.750", "fork: diverged", "partial", "1 constrained"):
        assert words in line
    assert line.endswith("a b ls([bold]{})")  # markup in what a model said is text


HOSTILE = "hi\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\u202e\u2028\ud800\nbye"
"""Writes the clipboard, clears the screen, colours and turns round what follows, and begins lines."""


@pytest.mark.parametrize(
    "reply",
    [
        {"content": HOSTILE},
        {"content": [{"type": "text", "text": HOSTILE}]},
        {"tool_calls": [{"function": {"name": HOSTILE, "arguments": "{}"}}]},
        {"tool_calls": [{"function": {"name": "ls", "arguments": HOSTILE}}]},
    ],
)
def test_what_a_model_said_is_characters_and_nothing_that_a_terminal_obeys(reply: dict[str, Any]) -> None:
    line = turn_line(turn(0, reply=reply)).plain
    assert line.isprintable()
    assert "hi ]52;c;cm0= [2J 31m bye" in line


def test_what_an_event_says_is_characters_and_nothing_that_a_terminal_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy:
        def events(self, trial_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
            yield "1", {"type": "aborted", "at": 1.0, "end_reason": HOSTILE}

    monkeypatch.setattr(sessions, "connect", lambda *_, **__: nullcontext(Proxy()))
    done = CliRunner().invoke(app, ["sessions", "tail", "t"])
    assert done.exit_code == 0, done.exception
    (line,) = done.stdout.splitlines()
    assert line.isprintable() and line.endswith("end_reason=hi ]52;c;cm0= [2J 31m bye")


def test_the_headline_tells_no_reward_from_a_reward_of_zero() -> None:
    def text(session: Session) -> str:
        console = Console(width=200, force_terminal=False)
        with console.capture() as capture:
            console.print(headline(session))
        return capture.get()

    assert "no reward" in text(SESSION)
    ended = SESSION.model_copy(
        update={
            "status": "completed",
            "end_reason": "limit:max_turns",
            "reward": 0.0,
            "marks": ["synthetic"],
            "counts": Counts(turns=3),
        }
    )
    assert "completed (limit:max_turns), reward 0" in text(ended)
    assert "marks: synthetic" in text(ended) and "3 turns" in text(ended)
