"""Recognition, one promise at a time. Each fork reason is reached here by a client that could really do it."""

from __future__ import annotations

import msgspec
import pytest

from steno.contracts.errors import StenoError
from steno.contracts.records import ForkReason, IndexRow
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.sessions.tree import Recognition, Tree
from tests.unit.proxy.sessions.agent import TOOLS, Recorded, assistant, system, tool, user

START = [system("You fix bugs."), user("Fix it.")]


def talked(turns: int = 3) -> tuple[Recorded, list]:
    """A session of one conversation with a tool call per turn; and its history, results of the last call included."""
    recorded, messages = Recorded(), list(START)
    for i in range(turns):
        messages = recorded.say(messages, f"step {i}", [("bash", f'{{"command": "ls {i}"}}')])
        messages.append(tool(messages[-1]["tool_calls"][0]["id"], f"output {i}"))
    return recorded, messages


def test_the_first_turn_is_a_root_without_a_reason():
    assert Recorded().look(START) == Recognition(-1, 0, None)


def test_a_continuation_covers_all_but_the_new_messages():
    recorded, messages = talked()
    assert recorded.look(messages) == Recognition(2, len(messages) - 1, None)


def test_a_request_that_ends_with_the_reply_itself_continues_it_with_nothing_new():
    recorded, messages = talked()
    assert recorded.look(messages[:-1]) == Recognition(2, len(messages) - 1, None)


def test_the_same_request_again_is_a_sibling():
    recorded, messages = talked()
    recorded.say(messages, "done")
    found = recorded.look(messages)
    assert (found.parent, found.fork_reason) == (2, ForkReason.SIBLING)
    assert recorded.look(START).fork_reason == ForkReason.SIBLING
    recorded.say(messages, "do", partial=True)
    assert recorded.look(messages) == found


def test_another_message_to_the_same_parent_diverges():
    recorded, messages = talked()
    recorded.say(messages, "done")
    found = recorded.look([*messages[:-1], {**messages[-1], "content": "other output"}])
    assert (found.parent, found.fork_reason) == (2, ForkReason.DIVERGED)


def test_a_reply_dropped_with_nothing_after_it_diverges():
    recorded, messages = talked()
    recorded.say(messages, "unusable")
    found = recorded.look([*messages, user("Answer in the format I asked for.")])
    assert (found.parent, found.fork_reason) == (2, ForkReason.DIVERGED)
    alone = Recorded()
    alone.say(START, "unusable")
    assert alone.look([*START, user("Again.")]) == (-1, 0, ForkReason.DIVERGED)


def test_a_sub_agent_or_compaction_under_the_same_system_prompt_is_a_new_conversation():
    recorded, _ = talked()
    for opening in ([START[0], user("Summary of what was done: …")], [system("You search."), user("Find x.")]):
        found = recorded.look(opening)
        assert (found.parent, found.fork_reason) == (-1, ForkReason.NEW_CONVERSATION)


def test_other_tools_are_no_continuation_and_say_so():
    recorded, messages = talked()
    found = recorded.look(messages, tools=[])
    assert (found.parent, found.prefix_messages, found.fork_reason) == (-1, 0, ForkReason.TOOLS_CHANGED)
    assert recorded.look(START, tools=[]).fork_reason is ForkReason.TOOLS_CHANGED


def test_other_template_options_are_no_continuation_and_say_so():
    recorded, messages = talked()
    found = recorded.look(messages, options={"enable_thinking": False})
    assert (found.parent, found.fork_reason) == (-1, ForkReason.OPTIONS_CHANGED)
    assert recorded.look(START, options={"enable_thinking": False}).fork_reason is ForkReason.OPTIONS_CHANGED
    both = recorded.look(messages, tools=[], options={"enable_thinking": False})
    assert both.fork_reason is ForkReason.TOOLS_CHANGED


def test_back_under_its_tools_a_conversation_goes_on_from_where_they_were_last_the_same():
    recorded, messages = talked()
    aside = [*messages, recorded.commit(recorded.ask(messages, tools=[]), "a summary")]
    found = recorded.look([*aside, user("Go on.")])
    assert (found.parent, found.prefix_messages) == (2, len(messages) - 1)
    assert found.fork_reason is ForkReason.TOOLS_CHANGED
    assert recorded.look([*aside, user("Go on.")], tools=[]).fork_reason is None


def test_a_changed_system_message_says_so():
    recorded, messages = talked()
    for opening in ([system("It is Tuesday.")], [system("You fix bugs."), system("It is Tuesday.")], []):
        for rest in (messages[1:], messages[1:2]):
            found = recorded.look([*opening, *rest])
            assert (found.parent, found.fork_reason) == (-1, ForkReason.SYSTEM_CHANGED)


def test_a_rewritten_message_says_so_and_the_beginning_still_counts():
    recorded, messages = talked()
    edited = list(messages)
    edited[3] = {**edited[3], "content": "[elided]"}
    found = recorded.look(edited)
    assert (found.parent, found.prefix_messages, found.fork_reason) == (0, 3, ForkReason.HISTORY_REWRITTEN)


def test_messages_compacted_into_one_are_a_rewritten_history():
    recorded, messages = talked(5)
    found = recorded.look([START[0], user("Summary …"), *messages[-4:]])
    assert (found.parent, found.fork_reason) == (-1, ForkReason.HISTORY_REWRITTEN)


def test_a_message_put_between_recorded_ones_is_a_rewritten_history():
    recorded, messages = talked()
    found = recorded.look([*messages[:2], user("A reminder."), *messages[2:]])
    assert found.fork_reason is ForkReason.HISTORY_REWRITTEN


@pytest.mark.parametrize("gone", [(1, 2), (2, 4), (3, 4), (4, 6), (3, 6)])
def test_missing_messages_say_so(gone):
    recorded, messages = talked()
    found = recorded.look(messages[: gone[0]] + messages[gone[1] :])
    assert found.fork_reason is ForkReason.HISTORY_DROPPED


def test_a_sliding_window_over_a_long_history_is_dropped_history():
    recorded, messages = talked(200)
    found = recorded.look(messages[:2] + messages[-4:])
    assert (found.parent, found.fork_reason) == (-1, ForkReason.HISTORY_DROPPED)


def test_a_completion_that_came_back_as_something_else_says_so():
    recorded, messages = talked()
    call_id = messages[-2]["tool_calls"][0]["id"]
    found = recorded.look([*messages[:-2], assistant("", (call_id, "invalid", "{}")), messages[-1]])
    assert (found.parent, found.fork_reason) == (1, ForkReason.ASSISTANT_REWRITTEN)


def test_few_shot_assistants_are_new_messages_like_others():
    recorded, messages = talked()
    found = recorded.look([*messages, assistant("I should look again."), user("Do.")])
    assert (found.parent, found.prefix_messages, found.fork_reason) == (2, len(messages) - 1, None)


def test_an_echoed_call_id_picks_among_identical_siblings():
    recorded = Recorded()
    asked = [recorded.ask(START) for _ in range(3)]
    replies = [recorded.commit(a, "", [("bash", "{}")]) for a in asked]
    for number, reply in enumerate(replies):
        result = tool(reply["tool_calls"][0]["id"], "same output")
        assert recorded.look([*START, reply, result]).parent == number
        recorded.say([*START, reply, result], "the same answer")
    stripped = {**replies[0], "tool_calls": [{**replies[0]["tool_calls"][0], "id": "gone"}]}
    assert recorded.look([*START, stripped]).parent == 2


def test_a_call_id_names_the_branch_below_it_too():
    recorded = Recorded()
    asked = [recorded.ask(START) for _ in range(2)]
    replies = [recorded.commit(a, "", [("bash", "{}")]) for a in asked]
    talks = [[*START, reply, user("No, tell me.")] for reply in replies]
    ends = [recorded.say(talk, "the same answer") for talk in talks]
    assert [recorded.look([*end, user("And?")]).parent for end in ends] == [2, 3]


def test_among_identical_siblings_without_ids_the_newest_whole_one_is_taken():
    recorded = Recorded()
    for partial in (False, False, True):
        recorded.say(START, "hello", partial=partial)
    assert recorded.look([*START, assistant("hello"), user("?")]).parent == 1


def test_a_partial_turn_can_be_gone_on_from_but_not_without_a_token():
    recorded = Recorded()
    recorded.say(START, "hel", partial=True)
    assert recorded.look([*START, assistant("hel"), user("?")]).parent == 0
    nothing = Recorded()
    nothing.say(START, "", partial=True, tokens=0)
    found = nothing.look([*START, assistant(""), user("?")])
    assert (found.parent, found.fork_reason) == (-1, ForkReason.DIVERGED)


def test_a_root_made_because_it_could_not_be_rendered_is_found_again():
    recorded, messages = talked()
    for _ in range(2):
        asked = recorded.ask(messages)
        reason = ForkReason.RENDER_REFUSED
        asked.found = asked.found._replace(parent=-1, prefix_messages=0, fork_reason=reason)
        recorded.commit(asked, "done")
        assert recorded.look(messages) == Recognition(2, len(messages) - 1, None)


def test_the_tree_knows_its_turns():
    recorded, messages = talked()
    tree = recorded.tree
    assert len(tree) == 3
    assert tree.number(recorded.rows[1].turn_id) == 1
    assert tree.number("000000000000") == -1
    assert (tree.ids[1], tree.parents[1], tree.finishes[1]) == (recorded.rows[1].turn_id, 0, "tool_calls")
    assert tree.tokens[2] == recorded.rows[2].path_tokens
    assert (tree.messages(2), tree.partial(2), tree.own_call_ids(2)) == (len(messages) - 1, False, ("own0",))


@pytest.mark.parametrize("broken", [{"parent": 3}, {"parent": -2}, {"digests": b""}, {"digests": b"x" * 17}])
def test_a_row_that_can_not_be_one_is_refused(broken):
    row = IndexRow("0" * 12, -1, b"u" * 32, b"t" * 8, b"o" * 8, "stop", False, 3)
    tree = Tree()
    with pytest.raises(StenoError, match="index row 0"):
        tree.add(msgspec.structs.replace(row, **broken))
    assert len(tree) == 0


def test_work_does_not_grow_with_the_session():
    """Counted, not timed: edges looked up for one request in a session with thousands of other turns (I5)."""
    recorded = Recorded()
    for i in range(1000):
        recorded.say([START[0], user(f"task {i % 7}")], f"answer {i % 3}")
    request = [*START, assistant("no such thing"), user("?")]

    class Counting(dict):
        looked_up = 0

        def get(self, *args):
            Counting.looked_up += 1
            return super().get(*args)

    for owner, name in (
        (recorded.tree._trie, "_edges"),
        (recorded.tree._history, "_replies"),
        (recorded.tree, "_best"),
    ):
        setattr(owner, name, Counting(getattr(owner, name)))
    recorded.look(request)
    recorded.look([START[0], user("task 3"), assistant("answer 1"), user("?")], TOOLS)
    assert Counting.looked_up < 20


def test_all_turns_that_were_asked_exactly_this_are_found_newest_first():
    recorded, messages = talked()
    recorded.say(messages, "done")
    recorded.say(messages, "do", partial=True)
    recorded.commit(recorded.ask(messages, tools=[]), "done")
    digests = [message_digest(message) for message in messages]
    tools, options = tools_digest(TOOLS), options_digest({})
    tree = recorded.tree
    assert tree.turns_asked(digests, tools, options) == [4, 3]
    assert tree.turns_asked(digests[-1:], tools, options, after=2) == [4, 3]
    assert tree.turns_asked(digests[:2], tools, options) == [0]
    assert tree.turns_asked(digests, tools_digest([]), options) == [5]
    assert tree.turns_asked([*digests, digests[0]], tools, options) == []
    assert tree.turns_asked(digests, tools_digest([TOOLS[0]] * 3), options) == []
    assert (tree.gone_on(2), tree.gone_on(3)) == (True, False)
    assert tree.along([*digests, digests[0]], 0, len(digests) + 1, 0, b"", b"")[0] == len(digests)
