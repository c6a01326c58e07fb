"""A client's own writing of a reply is told by our call ids, where it is one; what is something else is not."""

from __future__ import annotations

import pytest

from proxy.sessions.echoes import EchoedAs, echo_of, named_turn
from proxy.sessions.normalise import message_digest
from tests.unit.sessions.agent import assistant

TURN = "0123456789ab"
ONE, TWO = f"call_{TURN}_0", f"toolu_{TURN}_1"
REPLY = assistant("Both.", (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": '))


@pytest.mark.parametrize(
    "said",
    [
        assistant("Both.", (ONE, "invalid", '{"tool": "ls"}'), (TWO, "cat", '{"b": ')),
        assistant("Both.", (ONE, "ls", '{"a":1.0}'), (TWO, "cat", "{}")),
        assistant("Both.\n", (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": null}')),
        assistant("Both.", (ONE, "x", "{}"), (TWO, "y", "{}")),
    ],
)
def test_the_same_ids_in_the_same_order_are_the_reply(said):
    echo = echo_of(said, REPLY, TURN, partial=False)
    assert echo == (message_digest(REPLY), REPLY, EchoedAs.CALL_IDS)
    assert named_turn(said) == TURN


@pytest.mark.parametrize(
    "said",
    [
        assistant("Both."),
        assistant("", (ONE, "ls", '{"a": 2}'), (TWO, "cat", '{"b": ')),
        assistant("", (ONE, "ls", '{"a": 1}')),
        assistant("", ("call_aaaaaaaaaaaa_0", "ls", '{"a": 1}'), ("call_aaaaaaaaaaaa_1", "cat", '{"b": ')),
        assistant("Both, then.", (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": ')),
        assistant("Both.", (ONE, "ls", '{"a": 1}')),
        assistant("Both.", (ONE, "ls", '{"a": 2}'), (TWO, "cat", "{}")),
        assistant("Both.", (TWO, "x", "{}"), (ONE, "y", "{}")),
        assistant("Both.", (ONE, "x", "{}"), (ONE, "y", "{}")),
        assistant("Both.", ("call_aaaaaaaaaaaa_0", "x", "{}"), ("call_aaaaaaaaaaaa_1", "y", "{}")),
        assistant("Both.", ("x", "ls", '{"a": 1}'), ("y", "cat", '{"b": ')),
    ],
)
def test_other_text_other_ids_other_places_or_emptied_arguments_are_not(said):
    assert echo_of(said, REPLY, TURN, partial=False) is None


def test_its_calls_without_the_text_beside_them_are_the_reply():
    """CrewAI echoes calls with `content: null`, whatever was said beside them."""
    for content in ("", " \n"):
        said = assistant(content, (ONE, "ls", '{"a":1}'), (TWO, "cat", '{"b": '))
        assert echo_of(said, REPLY, TURN, partial=False) == (message_digest(REPLY), REPLY, EchoedAs.CALLS)


def test_a_beginning_is_one_of_a_turn_that_was_cut_off_only():
    said = assistant("Bo")
    reply = assistant("Both.")
    assert echo_of(said, reply, TURN, partial=True) == (message_digest(reply), reply, EchoedAs.BEGINNING)
    assert echo_of(said, reply, TURN, partial=False) is None


@pytest.mark.parametrize(
    "said", [assistant("x"), assistant("x", ("", "ls", "{}")), assistant("x", ("call_1", "ls", "{}"))]
)
def test_ids_that_are_not_ours_name_no_turn(said):
    assert named_turn(said) == ""
