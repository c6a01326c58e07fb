"""Turns that are on record while they still run: they have their place, and nobody goes on from them before they have ended."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.records import OPEN, ForkReason, IndexRow
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.sessions.tree import Recognition, Tree

USER = {"role": "user", "content": "hi"}
TEXT = {"role": "assistant", "content": "so far"}
WHOLE = TEXT | {"tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
TOOLS, OPTIONS = tools_digest([]), options_digest({})


def row(number: int, messages: list[Any], reply: Any, *, parent: int = -1, finish: str = "stop") -> IndexRow:
    digests = b"".join(map(message_digest, [*messages, reply]))
    calls = [""] if "tool_calls" in reply else []
    partial = finish in (OPEN, "error")
    return IndexRow(f"{number:012x}", parent, digests, TOOLS, OPTIONS, finish, partial, 9, calls, 3)


def look(tree: Tree, *messages: Any) -> Recognition:
    return tree.recognise(list(map(message_digest, messages)), TOOLS, OPTIONS, [[] for _ in messages])


def test_a_turn_that_runs_has_a_place_and_no_end() -> None:
    tree = Tree()
    assert tree.add(row(0, [USER], TEXT, finish=OPEN), running=True) == 0
    assert look(tree, USER, TEXT, USER).parent == -1
    assert look(tree, USER).fork_reason == ForkReason.SIBLING, "it was asked"
    longer = msgspec.structs.replace(row(0, [USER], WHOLE, finish="tool_calls"), path_tokens=11)
    tree.settle(0, longer)
    assert tree.tokens[0] == 11, "and not the 9 that it was saved with"
    assert look(tree, USER, TEXT, USER).parent == -1, "what it said on the way was never its end"
    assert look(tree, USER, WHOLE, USER) == (0, 2, None)
    assert (tree.finishes[0], tree.partial(0), tree.own_call_ids(0)) == ("tool_calls", False, ("",))


def test_one_that_stays_open_can_be_gone_on_from_by_who_reads_it() -> None:
    """Its proxy is dead: for everybody else it is a partial turn."""
    tree = Tree()
    tree.add(row(0, [USER], TEXT, finish=OPEN))
    assert look(tree, USER, TEXT, USER) == (0, 2, None)
    assert tree.partial(0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=12),
    st.randoms(use_true_random=False),
)
def test_in_whatever_order_running_turns_end_the_tree_is_the_same(
    drawn: list[tuple[int, int, bool]], draw: random.Random
) -> None:
    """As that of a replica that reads the rows when all have ended."""
    rows: list[IndexRow] = []
    histories: list[list[Any]] = []
    for number, (parent, word, _) in enumerate(drawn):
        parent = min(parent, number) - 1
        new = [{"role": "user", "content": f"say {word}"}]
        reply = {"role": "assistant", "content": f"reply {number % 2}"}
        histories.append([*(histories[parent] if parent >= 0 else []), *new, reply])
        rows.append(row(number, new, reply, parent=parent))
    plain, lived = Tree(), Tree()
    running: list[int] = []
    for number, one in enumerate(rows):
        plain.add(one)
        children_to_come = any(later.parent == number for later in rows[number + 1 :])
        runs = drawn[number][2] and not children_to_come
        lived.add(msgspec.structs.replace(one, finish=OPEN, partial=True) if runs else one, running=runs)
        running += [number] if runs else []
    draw.shuffle(running)
    for number in running:
        lived.settle(number, rows[number])
    for history in histories:
        for cut in range(1, len(history) + 1):
            for extra in ([], [{"role": "user", "content": "say 1"}], [{"role": "user", "content": "other"}]):
                asked = [*history[:cut], *extra]
                assert look(lived, *asked) == look(plain, *asked)
