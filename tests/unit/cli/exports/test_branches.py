"""Which paths of a conversation tree are exported, and which conversation is taken for a sub-agent's."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.records import Timings, Turn, ids_to_bytes
from steno_cli.exports.branches import branches_of, delegations

CALLS = [{"id": "c", "type": "function", "function": {"name": "task", "arguments": "{}"}}]


def session(*drawn: tuple[str, str | None], **changed: dict[str, Any]) -> list[Turn]:
    """Turns (id, parent) in commit order; an id that ends with `!` has called a tool. changed: fields, by turn."""
    return [
        Turn(
            **{
                "turn_id": name,
                "parent_id": parent,
                "index": index,
                "completion_ids": ids_to_bytes([7]),
                "reply": {"content": "x"} | ({"tool_calls": CALLS} if name.endswith("!") else {}),
                "timings": Timings(queued=0.0),
            }
            | changed.get(name, {})
        )
        for index, (name, parent) in enumerate(drawn)
    ]


def paths(turns: list[Turn]) -> list[tuple[str, int]]:
    return [(" ".join(turn.turn_id for turn in one.turns), one.shared) for one in branches_of(turns)]


def test_a_branch_for_each_leaf_in_the_order_of_their_commits() -> None:
    turns = session(("a", None), ("b", "a"), ("c", "a"), ("d", "b"), ("e", "c"))
    assert paths(turns) == [("a b d", 0), ("a c e", 1)]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"completion_ids": b"", "reply": {"content": ""}}, False),
        ({"superseded_by": "z"}, False),
        ({"completion_ids": b"", "reply": {"content": "text alone"}}, True),
        ({"completion_ids": b"", "upstream_tokens": 3, "reply": {}}, True),
        ({"partial": True, "error": "engine_failed"}, True),
    ],
)
def test_a_leaf_that_said_nothing_or_whose_place_another_took_is_none(fields: dict[str, Any], kept: bool) -> None:
    turns = session(("a", None), ("b", "a"), b=fields)
    assert paths(turns) == [("a b" if kept else "a", 0)]


def test_a_turn_that_said_nothing_stays_where_another_goes_on_from_it() -> None:
    turns = session(("a", None), ("b", "a"), ("c", "b"), b={"completion_ids": b"", "reply": {}})
    assert paths(turns) == [("a b c", 0)]


@pytest.mark.parametrize(
    ("drawn", "found"),
    [
        ([("a!", None), ("s", None), ("t", "s"), ("b", "a!")], {"s": "a!"}),
        ([("a", None), ("s", None), ("b", "a")], {}),  # no call waited
        ([("a!", None), ("s", None), ("b", "a!"), ("t", "s")], {}),  # it went on after the results were there
        ([("s", None), ("a!", None), ("b", "a!")], {}),  # before: a title
        ([("a!", None), ("b", "a!"), ("s", None)], {}),  # after: a compaction
        (
            [("a!", None), ("s!", None), ("u", None), ("t", "s!"), ("b", "a!")],
            {"s!": "a!", "u": "s!"},
        ),  # one within another
        ([("a!", None), ("s", None), ("u", None), ("t", "s"), ("b", "a!")], {"s": "a!", "u": "a!"}),  # two side by side
    ],
)
def test_a_sub_agent_worked_between_a_call_and_its_continuation(
    drawn: list[tuple[str, str | None]], found: dict[str, str]
) -> None:
    turns = session(*drawn)
    assert delegations(turns, branches_of(turns)) == found
