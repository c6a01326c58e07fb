"""A reply whose calls come back each with its result behind it is one message again, and only where nothing else is there."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Message
from steno_proxy.sessions.gathered import gathered
from tests.unit.proxy.sessions.agent import Recorded, assistant, tool, user

ASKED = user("?")


def recorded(calls: int) -> tuple[Recorded, list[tuple[str, str, str]]]:
    """One turn with so many calls, as its client sees them."""
    session = Recorded()
    reply = session.commit(session.ask([ASKED]), "I look.", [("ls", f'{{"a": {i}}}') for i in range(calls)])
    return session, [(call["id"], "ls", call["function"]["arguments"]) for call in reply["tool_calls"]]


def apart(calls: list[tuple[str, str, str]], text: str = "I look.") -> list[Message]:
    messages: list[Message] = []
    for i, call in enumerate(calls):
        messages += [assistant("" if i else text, call), tool(call[0], f"result {i}")]
    return messages


def test_calls_with_their_results_between_them_are_one_reply_before_its_results():
    session, calls = recorded(3)
    more = assistant("Done.")
    found, places = gathered([ASKED, *apart(calls), more], session.tree)
    results = [tool(call[0], f"result {i}") for i, call in enumerate(calls)]
    assert (found, places) == ([ASKED, assistant("I look.", *calls), *results, more], {1})


def test_several_calls_may_stand_in_one_message_and_several_messages_before_a_result():
    session, calls = recorded(4)
    first, second, third = assistant("", *calls[:2]), assistant("", calls[2]), assistant("", calls[3])
    results = [tool(call[0], "x") for call in calls]
    said = [ASKED, assistant("I look."), first, results[0], second, third, *results[1:]]
    found, places = gathered(said, session.tree)
    assert (found, places) == ([ASKED, assistant("I look."), assistant("", *calls), *results], {2})


def test_reasoning_that_stands_on_each_of_its_messages_counts_once():
    session, calls = recorded(2)
    said = [{**one, "reasoning_content": "Hm."} if one["role"] == "assistant" else one for one in apart(calls)]
    assert gathered(said, session.tree)[0][0] == {**assistant("I look.", *calls), "reasoning_content": "Hm."}
    assert said[2]["reasoning_content"] == "Hm.", "the client's own messages stay as they are"


def test_turns_one_after_the_other_are_each_put_together():
    session = Recorded()
    history, wanted = [ASKED], [ASKED]
    for _ in range(3):
        reply = session.commit(session.ask(wanted), "I look.", [("ls", "{}"), ("cat", "{}")])
        calls = [(call["id"], call["function"]["name"], "{}") for call in reply["tool_calls"]]
        history += apart(calls)
        wanted += [reply, *(tool(call[0], f"result {i}") for i, call in enumerate(calls))]
    found, places = gathered(history, session.tree)
    assert (found, places) == (wanted, {1, 4, 7})


def changes(calls: list[tuple[str, str, str]]) -> dict[str, list[Message]]:
    said = apart(calls)
    foreign = [(f"call_ffffffffffff_{i}", "ls", "{}") for i in range(3)]
    return {
        "a call is missing": apart(calls[:2]),
        "the first call is missing": apart(calls[1:]),
        "another order": apart([calls[1], calls[0], calls[2]]),
        "a call twice": apart([*calls[:2], *calls[1:]]),
        "of another trial": apart(foreign),
        "ids that are not ours": apart([("a", "ls", "{}"), ("b", "ls", "{}"), ("c", "ls", "{}")]),
        "a text later on": [*said[:2], {**said[2], "content": "And"}, *said[3:]],
        "a text between": [*said[:2], assistant("And"), *said[2:]],
        "a user between": [*said[:2], user("wait"), *said[2:]],
        "another result between": [*said[:2], tool("x", "y"), *said[2:]],
        "a result before its call": [said[0], said[3], said[2], said[1], *said[4:]],
        "in one message": [assistant("I look.", *calls), said[1], said[3], said[5]],
        "neighbours": [said[0], said[2], said[4], said[1], said[3], said[5]],
    }


@pytest.mark.parametrize("change", changes(recorded(3)[1]))
def test_anything_else_stays_as_its_client_wrote_it(change: str):
    session, calls = recorded(3)
    said = [ASKED, *changes(calls)[change]]
    found, places = gathered(said, session.tree)
    assert found is said and not places


def test_a_message_of_the_tools_role_first_or_an_empty_request_is_nothing():
    session, calls = recorded(2)
    wrong = [{**one, "role": "user"} if "tool_calls" in one else one for one in apart(calls)]
    for said in ([], [tool(calls[0][0], "x")], wrong):
        assert gathered(said, session.tree) == (said, frozenset())


def test_results_and_calls_of_another_turn_of_the_trial_are_something_else():
    session, calls = recorded(2)
    others = session.commit(session.ask([ASKED]), "I look.", [("ls", "{}"), ("ls", "{}")])["tool_calls"]
    first, result, second, _ = apart(calls)
    for said in (
        [ASKED, first, result, tool(others[0]["id"], "x"), second],
        [ASKED, first, result, assistant("", (others[1]["id"], "ls", "{}"))],
    ):
        assert gathered(said, session.tree) == (said, frozenset())
