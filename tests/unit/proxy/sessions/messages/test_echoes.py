"""A client's own writing of a reply is told by our call ids, where it is one; what is something else is not."""

from __future__ import annotations

import json

import pytest

from steno_proxy.sessions.messages.echoes import EchoedAs, echo_of, named_turn
from steno_proxy.sessions.messages.normalise import message_digest
from tests.unit.proxy.sessions.agent import assistant

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


SAMPLED = '{"input": "ls\\n", "workdir": "/a"}'
OTHER = '{"patch": "ls"}'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (SAMPLED, {"input": "ls\n"}),
        (SAMPLED, {"input": SAMPLED}),
        (OTHER, {"input": OTHER}),
        ('{"input": ["ls"]}', {"input": '{"input": ["ls"]}'}),
    ],
)
def test_what_the_client_of_a_free_text_tool_was_given_of_a_call_is_that_call(arguments, said):
    reply = assistant("Both.", (ONE, "exec", arguments), (TWO, "exec", '{"input": "pwd"}'))
    echo = assistant("Both.", (ONE, "exec", json.dumps(said)), (TWO, "exec", '{"input":"pwd"}'))
    assert echo_of(echo, reply, TURN, partial=False) == (message_digest(reply), reply, EchoedAs.CALL_IDS)
    foreign = assistant("Both.", ("x", "exec", json.dumps(said)), ("y", "exec", '{"input":"pwd"}'))
    assert echo_of(foreign, reply, TURN, partial=False) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (SAMPLED, {"input": "ls"}),
        (SAMPLED, {"input": ""}),
        (SAMPLED, {}),
        (SAMPLED, {"input": "ls\n", "more": 1}),
        (OTHER, {"input": "ls"}),
        (OTHER, {"input": None}),
        (OTHER, {"patch": OTHER}),
    ],
)
def test_other_text_of_a_free_text_tool_is_another_call(arguments, said):
    reply = assistant("Both.", (ONE, "exec", arguments))
    assert echo_of(assistant("Both.", (ONE, "exec", json.dumps(said))), reply, TURN, partial=False) is None


def test_its_calls_without_the_text_beside_them_are_the_reply():
    """CrewAI echoes calls with `content: null`, whatever was said beside them."""
    for content in ("", " \n"):
        said = assistant(content, (ONE, "ls", '{"a":1}'), (TWO, "cat", '{"b": '))
        assert echo_of(said, REPLY, TURN, partial=False) == (message_digest(REPLY), REPLY, EchoedAs.CALLS)


@pytest.mark.parametrize("around", ["{}", "{}\n", "\n\n{}", " \t{}\r\n "])
@pytest.mark.parametrize("calls", [(), ((ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": '))])
def test_white_space_around_a_reply_may_be_taken_off_or_put_on(around, calls):
    reply = assistant("\n\nBoth,\n then.\n\n", *calls)
    said = assistant(around.format("Both,\n then."), *(("x", name, arguments) for _, name, arguments in calls))
    assert echo_of(said, reply, TURN, partial=False) == (message_digest(reply), reply, EchoedAs.SPACE)


@pytest.mark.parametrize(
    "said",
    [
        assistant("Both, then.\n"),
        assistant("Both,\n then."),
        assistant("Both,  then.", ("x", "ls", "{}")),
        assistant("Both,  then.", ("x", "ls", '{"a": 1}'), ("y", "ls", '{"a": 1}')),
        assistant("", ("x", "ls", '{"a": 1}')),
    ],
)
def test_white_space_inside_a_reply_or_other_calls_are_another_message(said):
    reply = assistant("\nBoth,  then.", ("call_ffffffffffff_0", "ls", '{"a": 1}'))
    assert echo_of(said, reply, TURN, partial=False) is None


def test_digests_on_record_are_of_what_was_sampled_white_space_included():
    """As revision 30876af wrote them."""
    assert message_digest(assistant("Both.")).hex() == "61c47b4a01370ce9ea1da37b20a5d8e8"
    assert message_digest(assistant("\n\nBoth.\n")).hex() == "615b547fe658a30de6b5cde1d86e5946"


def test_a_beginning_is_one_of_a_turn_that_was_cut_off_only():
    said = assistant("Bo")
    reply = assistant("Both.")
    assert echo_of(said, reply, TURN, partial=True) == (message_digest(reply), reply, EchoedAs.BEGINNING)
    assert echo_of(said, reply, TURN, partial=False) is None


THOUGHT = {**REPLY, "reasoning_content": "Let me see.\n"}


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nLet me see.\n</think>\n\nBoth.\n",
        "<thinking>Let me see.</thinking>Both.",
        "\n<chain-of-thought> Let me see.\n\n</chain-of-thought> Both.",
    ],
)
def test_a_reply_with_its_reasoning_between_tags_before_its_text_is_the_reply(text):
    """gptme keeps it so."""
    said = assistant(text, (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": '))
    assert echo_of(said, THOUGHT, TURN, partial=False) == (message_digest(REPLY), THOUGHT, EchoedAs.REASONING)
    reply = {**assistant("\n\nBoth."), "reasoning_content": "Let me see."}
    assert echo_of(assistant(text), reply, TURN, partial=False) == (message_digest(reply), reply, EchoedAs.REASONING)


@pytest.mark.parametrize(
    "text",
    [
        "<think>Let me not see.</think>Both.",
        "<think>Let me see.</thinking>Both.",
        "<think>Let me see.</think>Neither.",
        "<think>Let me see.",
        "Well. <think>Let me see.</think>Both.",
    ],
)
def test_other_reasoning_or_other_text_behind_it_is_not_the_reply(text):
    said = assistant(text, (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": '))
    assert echo_of(said, THOUGHT, TURN, partial=False) is None
    assert echo_of(said, REPLY, TURN, partial=False) is None, "no reasoning is on record"


TAGGED = assistant("<think>\nLet me see.\n</think>\n\nBoth.")
"""As a worker without a reasoning parser gives it."""


@pytest.mark.parametrize(
    "said",
    [
        {**assistant("\n\nBoth."), "reasoning_content": "\nLet me see.\n"},
        {**assistant("Both."), "reasoning_content": "Let me see."},
        assistant("<think>\n\nLet me see.\n\n</think>\n\nBoth."),
        assistant("<think>Let me see.</think>Both."),
    ],
)
def test_a_reply_whose_text_has_its_reasoning_between_tags_may_come_back_otherwise(said):
    """LiteLLM takes it out of the text; pydantic-ai writes it anew, with other white space."""
    assert echo_of(said, TAGGED, TURN, partial=False) == (message_digest(TAGGED), TAGGED, EchoedAs.REASONING)
    calls = (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": ')
    with_calls = {**REPLY, "content": TAGGED["content"]}
    echo = echo_of({**said, "tool_calls": assistant("", *calls)["tool_calls"]}, with_calls, TURN, partial=False)
    assert echo == (message_digest(with_calls), with_calls, EchoedAs.REASONING)


@pytest.mark.parametrize(
    "said",
    [
        assistant("Both."),
        assistant("\n\nBoth."),
        {**assistant("Both."), "reasoning_content": "Let me not see."},
        {**assistant("Neither."), "reasoning_content": "Let me see."},
        assistant("<think>Let me not see.</think>Both."),
        assistant("<think>Let me see.</think>Neither."),
    ],
)
def test_other_reasoning_or_none_of_a_reply_with_tags_is_not_the_reply(said):
    assert echo_of(said, TAGGED, TURN, partial=False) is None


def test_space_around_a_reply_with_tags_is_only_that():
    echo = echo_of(assistant(TAGGED["content"] + "\n"), TAGGED, TURN, partial=False)
    assert echo is not None and echo.how is EchoedAs.SPACE
    begun = {**assistant("Bo"), "reasoning_content": "Let me see."}
    echo = echo_of(begun, TAGGED, TURN, partial=True)
    assert echo is not None and echo.how is EchoedAs.BEGINNING
    empty = assistant("<think>\n\n</think>\n\nBoth.")
    assert echo_of(assistant("Both."), empty, TURN, partial=False) is None, "who leaves out an empty thought says less"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "content",
    [
        parts("Let me see.", "Both."),
        parts("\nLet me see.\n", "", "\nBo", "th."),
        "Let me see.\n\n\nBoth.\n",
        "Let me see.Both.",
        parts("Let me", " see.\n", "Both."),
    ],
)
def test_a_reply_with_its_reasoning_without_tags_before_its_text_is_the_reply(content):
    """Zed sends both as texts, the reasoning first."""
    said = {**assistant("", (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": ')), "content": content}
    assert echo_of(said, THOUGHT, TURN, partial=False) == (message_digest(REPLY), THOUGHT, EchoedAs.REASONING)
    assert echo_of(said, REPLY, TURN, partial=False) is None, "no reasoning is on record"


def test_reasoning_before_calls_without_a_text_is_the_reply():
    reply = {**assistant("", (ONE, "ls", "{}")), "reasoning_content": "Let me see.\n"}
    said = assistant("Let me see.", (ONE, "ls", "{}"))
    assert echo_of(said, reply, TURN, partial=False) == (message_digest(reply), reply, EchoedAs.REASONING)


def test_a_text_that_begins_as_its_reasoning_does_is_the_reply():
    reply = {**assistant("Let me see.\n\nBoth."), "reasoning_content": "Let me see."}
    for content in (parts("Let me see.", "Both."), parts("Let me see.", "Let me see.\n\nBoth.")):
        assert echo_of({**assistant(), "content": content}, reply, TURN, partial=False) is not None


def test_arguments_that_are_no_object_are_not_what_was_sampled():
    reply = assistant("Both.", (ONE, "ls", '{"a": null}'))
    for arguments in ("[1]", "null", "no JSON"):
        assert echo_of(assistant("Both.", (ONE, "ls", arguments)), reply, TURN, partial=False) is None


@pytest.mark.parametrize(
    "content",
    [
        parts("Let me see.", "Neither."),
        parts("Let me see.", "Both.", "And more."),
        parts("Let me", " see.", "Both. And more."),
        parts("Both.", "Let me see."),
        parts("Well.", "Let me see.", "Both."),
        parts("Let me see.", " "),
        "Let me see.",
        "Let me see. Both",
        "Let me not see.Both.",
        "Let me see. Let me see. Both.",
    ],
)
def test_reasoning_before_another_text_or_without_it_is_not_the_reply(content):
    said = {**assistant("", (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": ')), "content": content}
    assert echo_of(said, THOUGHT, TURN, partial=False) is None


LS_CAT = (ONE, "ls", '{"a": 1}'), (TWO, "cat", '{"b": 2}')


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        ("Both.", "Bo\nth."),
        ("Both.", "Bo\nt\nh.\n"),
        ("Both.", "Bo\n\nth."),
        ("B\nth.", "B\n\nth."),
        ("\nBoth.", "Bo\nth."),
    ],
)
def test_text_around_calls_may_have_a_line_end_for_each_call(whole, text):
    """Grok Build joins the texts before and after a call by a line end. The record does not say where a call stood."""
    reply = assistant(whole, *LS_CAT)
    echo = echo_of(assistant(text, *LS_CAT), reply, TURN, partial=False)
    assert echo == (message_digest(reply), reply, EchoedAs.CALL_IDS)
    foreign = [("x", name, arguments) for _, name, arguments in LS_CAT]
    assert echo_of(assistant(text, *foreign), reply, TURN, partial=False) is None, "under its own ids only"
    assert echo_of(assistant(text), assistant(whole), TURN, partial=False) is None


@pytest.mark.parametrize(
    "text",
    ["Bo th.", "Bo\n\n\nth.", "Bo\n\nt\nh.", "Bo\nh.", "Bo\nth", "Bo\nt.h", "Bo\rth.", "Bo\nth.\n\n!", "Both\n\n"],
)
def test_more_line_ends_or_other_space_in_a_text_are_another_message(text):
    assert echo_of(assistant(text, *LS_CAT), assistant("Both.", *LS_CAT), TURN, partial=False) is None


def test_what_else_an_echo_may_be_it_may_be_with_its_reasoning_before_it():
    reply = {**assistant("\n\nI see both."), "reasoning_content": "Let me see."}
    how = echo_of(assistant("<think>\nLet me see.\n</think>\n\nI see"), reply, TURN, partial=True)
    assert how is not None and how.how is EchoedAs.BEGINNING
    how = echo_of({**reply, "content": parts("Let me see.", "I see")}, reply, TURN, partial=True)
    assert how is not None and how.how is EchoedAs.BEGINNING
    said = assistant("<think>Let me see.</think>Both.", (ONE, "invalid", "{}"), (TWO, "cat", "{}"))
    how = echo_of(said, THOUGHT, TURN, partial=False)
    assert how is not None and how.how is EchoedAs.CALL_IDS


@pytest.mark.parametrize(
    "said", [assistant("x"), assistant("x", ("", "ls", "{}")), assistant("x", ("call_1", "ls", "{}"))]
)
def test_ids_that_are_not_ours_name_no_turn(said):
    assert named_turn(said) == ""
