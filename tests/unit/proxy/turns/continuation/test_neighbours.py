"""Neighbours of one role: one message in Messages, never in chat, and in both whatever is on record (ADR 17)."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Message
from steno.contracts.records import ForkReason
from steno_proxy.turns.continuation import MOST_CANDIDATES, fork_reason_now
from tests.unit.proxy.sessions.agent import assistant, tool, user
from tests.unit.proxy.trial import HI, ON, TOOL, Trial, reply

LS = ("call_000000000000_0", "ls", "{}")
CALL = assistant("", LS)["tool_calls"]
"""Of the first turn of a trial."""
TEXT, CALLS, RESULT = reply("I look."), assistant("", LS), tool(LS[0], "a file")


def contents(messages: list[Message]) -> list[object]:
    return [message["content"] for message in messages]


async def test_in_messages_they_are_one_where_nothing_is_on_record() -> None:
    found = await Trial().asked(HI, user("go"), reply("a"), reply("b"), ON, user(""), merges=True)
    parts = [[{"type": "text", "text": text} for text in both] for both in (("hi", "go"), ("a", "b"))]
    assert contents(found.job.messages) == [*parts, "go on"] == contents(found.new_messages)
    assert (len(found.digests), len(found.new_digests)) == (3, 48)
    assert found.fork_reason is None


async def test_in_chat_the_model_is_shown_what_the_client_wrote() -> None:
    said = [HI, user("go"), reply("a"), reply("b"), ON]
    found = await Trial().asked(*said)
    assert found.job.messages == said == found.new_messages


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("around", ["{}", "\n\n{}\n"], ids=["as it was said", "but for white space"])
async def test_a_reply_in_two_messages_is_gone_on_from(merges: bool, around: str) -> None:
    """Trae Agent: text, then its call."""
    trial = Trial()
    first = await trial.said(around.format("I look."), calls=CALL)
    found = await trial.asked(HI, TEXT, CALLS, RESULT, merges=merges)
    exact = around == "{}"
    assert (found.parent, found.fork_reason, found.prefix.messages) == (first, None, 2)
    assert found.echoed_as == ("split" if not merges else None if exact else "space")
    assert found.job.messages[1]["content"] == around.format("I look."), "the worker is given what was sampled"
    assert contents(found.job.messages[2:]) == ["a file"] == contents(found.new_messages)
    assert trial.store.reads == (1 if exact else 2), "of the path, and of the reply where it has to be compared"


async def test_parts_of_a_reply_may_have_lost_the_white_space_between_them() -> None:
    trial = Trial()
    first = await trial.said("One.\n\nTwo.\n")
    found = await trial.asked(HI, reply("One."), reply("Two."), ON)
    assert (found.parent, found.echoed_as) == (first, "split")
    assert (await trial.asked(HI, reply("On"), reply("e.Two."), ON)).parent == first, "together they say it"
    for other in (("One.", "Three."), ("Two.", "One."), ("One.", "Tw o.")):
        found = await trial.asked(HI, *map(reply, other), ON)
        assert (found.parent, found.fork_reason) == (-1, ForkReason.ASSISTANT_REWRITTEN)
        assert found.job.messages == [HI, *map(reply, other), ON]


async def test_a_conversation_of_split_replies_stays_one_line() -> None:
    trial, history, parent, asked = Trial(), [HI], -1, HI
    for i in range(20):
        parent = await trial.said(f"I look.\n{i}\n", asked, after=parent)
        history += [reply("I look."), reply(str(i)), ON]
        asked = ON
    other = trial.replica()
    for recorder in (trial.recorder, trial.recorder, other, other):
        found = await trial.asked(*history, recorder=recorder)
        assert (found.parent, found.prefix.messages, found.fork_reason) == (parent, 40, None)
        assert [message["content"] for message in found.job.messages[1::2]] == [f"I look.\n{i}\n" for i in range(20)]
        assert [len(digest) for digest in found.digests] == [16] * 41
    assert trial.store.reads == 2 * (20 + 2), "each reply once at each replica, and the path"


async def test_what_an_older_replica_recorded_message_by_message_is_gone_on_from() -> None:
    """Revision 30876af knew no neighbours: a root for each turn of Trae Agent, two messages of the user in a row."""
    trial = Trial()
    old = await trial.said("Done.", HI, user("go"), TEXT, CALLS, RESULT)
    found = await trial.asked(HI, user("go"), TEXT, CALLS, RESULT, reply("Done."), ON, user("now"), merges=True)
    assert (found.parent, found.prefix.messages, found.fork_reason) == (old, 6, None)
    assert len(found.new_messages) == 1 and len(found.new_digests) == 16, "what is new is one message"
    assert len(found.job.messages) == 7
    again = await trial.asked(HI, user("go"), TEXT, CALLS, RESULT, merges=True)
    assert (again.parent, again.fork_reason) == (-1, ForkReason.SIBLING)


async def test_replicas_of_two_versions_write_one_session_and_the_longest_conversation_is_gone_on_from() -> None:
    trial = Trial()
    await trial.said("I look.", HI, calls=CALL)
    second = await trial.said("Done.", HI, TEXT, CALLS, RESULT)  # the older replica: a root
    found = await trial.asked(HI, TEXT, CALLS, RESULT, reply("Do"), reply("ne."), ON, merges=True)
    assert (found.parent, found.prefix.messages, found.fork_reason) == (second, 5, None)
    third = await trial.said("More.", ON, after=second)
    history = [HI, TEXT, CALLS, RESULT, reply("Do"), reply("ne."), ON, reply("Mo"), reply("re."), ON]
    fourth = await trial.said("End.", *history)  # the older one again
    newest = trial.replica()
    assert (await trial.asked(*history, merges=True, recorder=newest)).parent == third
    assert (await trial.asked(*history, reply("End."), ON, merges=True, recorder=newest)).parent == fourth


async def test_thirty_turns_of_two_versions_in_turn_go_on_from_the_last_one() -> None:
    """Each turn of the older replica is a root, message by message; each of the newer one goes on from it."""
    trial, history, last = Trial(), [HI], -1
    for i in range(30):
        found = await trial.asked(*history, merges=True)
        assert found.parent == last
        if i % 2:
            last = await trial.said(f"\na{i}b{i}", *found.new_messages, after=last)
        else:
            last = await trial.said(f"\na{i}b{i}", *history)
        history += [reply(f"a{i}"), reply(f"b{i}"), ON]


async def test_what_is_not_gone_on_from_is_shown_and_recorded_in_the_formats_own_manner() -> None:
    """The tools change: all is rendered anew."""
    trial = Trial()
    await trial.said("I look.", HI, calls=CALL)
    history = [HI, TEXT, CALLS, RESULT]
    chat = await trial.asked(*history, tools=TOOL)
    assert (chat.parent, chat.fork_reason, chat.job.messages) == (-1, ForkReason.TOOLS_CHANGED, history)
    assert len(chat.digests) == 4
    messages = await trial.asked(*history, tools=TOOL, merges=True)
    assert (messages.parent, messages.fork_reason) == (-1, ForkReason.TOOLS_CHANGED)
    assert contents(messages.job.messages) == ["hi", "I look.", "a file"] == contents(messages.new_messages)
    recording = await trial.recorder.enter("t")
    after = await trial.said("Done.", *history, tools=TOOL)
    await trial.recorder.enter("t")
    assert fork_reason_now(recording, chat) == ForkReason.SIBLING
    for replica in (trial.recorder, trial.replica()):
        found = await trial.asked(*history, reply("Done."), ON, tools=TOOL, recorder=replica)
        assert (found.parent, found.fork_reason) == (after, None)


async def test_echoes_that_are_not_gone_on_from_are_recorded_as_they_were_shown() -> None:
    """So that every replica goes on from there, also one that has not seen what they stood for."""
    trial = Trial()
    await trial.said("\nOne.")
    second = await trial.said("\nTwo.", ON, after=0)
    history = [HI, reply("One."), ON, reply("Two."), ON]
    assert (await trial.asked(*history)).parent == second
    changed = await trial.asked(*history, tools=TOOL)
    assert (changed.fork_reason, changed.job.messages) == (ForkReason.TOOLS_CHANGED, history)
    third = await trial.said("Three.", *changed.new_messages, tools=TOOL)
    recording = await trial.recorder.enter("t")
    assert recording.tree.turns_asked(changed.digests, changed.tools, changed.options) == [third]
    for replica in (trial.recorder, trial.replica()):
        assert (await trial.asked(*history, reply("Three."), ON, tools=TOOL, recorder=replica)).parent == third


async def test_three_thousand_siblings_cost_a_split_reply_no_more_than_sixteen_reads() -> None:
    trial = Trial()
    for i in range(3000):
        await trial.said(f"\n{i} and more\n")
    assert (await trial.asked(HI, reply("other"), reply("words"), ON)).fork_reason == ForkReason.ASSISTANT_REWRITTEN
    assert trial.store.reads == MOST_CANDIDATES
    assert (await trial.asked(HI, reply("2990"), reply("and more"), ON)).parent == 2990
    assert trial.store.reads == MOST_CANDIDATES + 1, "of the path: the replies are known by now"


async def test_ids_of_calls_name_the_reply_that_came_back_in_several() -> None:
    trial = Trial()
    first = await trial.said("I look.\n", calls=CALL)
    for i in range(40):
        await trial.said("I look.\n", calls=assistant("", (f"call_{i + 1:012x}_0", "ls", "{}"))["tool_calls"])
    assert (await trial.asked(HI, TEXT, CALLS, RESULT)).parent == first
