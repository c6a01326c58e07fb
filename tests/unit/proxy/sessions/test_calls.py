from __future__ import annotations

import pytest

from steno_proxy.sessions.calls import answer_reply, restore_calls
from steno_proxy.sessions.messages.call_ids import client_call_id, echoed_ids, parse_call_id
from tests.unit.proxy.sessions.agent import Recorded, assistant, tool, user


@pytest.mark.parametrize("prefix", ["call", "toolu", "fc", "chatcmpl-tool", "a_b"])
def test_our_ids_name_their_turn_under_any_prefix(prefix):
    assert parse_call_id(client_call_id(prefix, "0123456789ab", 12)) == ("0123456789ab", 12)


@pytest.mark.parametrize(
    "foreign",
    [
        "", "call_1", "functions.bash:0", "call_0123456789AB_0", "call_0123456789ab_01", "call_0123456789ab_-1",
        "_0123456789ab_0", "call_0123456789ab", "call_0123456789ab_0_", "call_0123456789ab_0\n", "call_0123456789ab_٣",
        "call_00123456789ab_0", "call_0123456789ab_99999", "0123456789ab_0",
    ],
)  # fmt: skip
def test_other_ids_are_not_ours(foreign):
    assert parse_call_id(foreign) is None


def test_a_message_carries_the_ids_of_its_calls_or_of_its_result():
    assert echoed_ids(assistant("", ("a", "f", "{}"), ("b", "f", "{}"))) == ["a", "b"]
    assert echoed_ids(tool("a", "out")) == ["a"]
    assert (
        echoed_ids(user("hi"))
        == echoed_ids({"role": "tool"})
        == echoed_ids({"role": "assistant", "tool_calls": None})
        == []
    )


def test_our_ids_become_the_models_own_wherever_they_stand():
    recorded = Recorded()
    messages = recorded.say([user("go")], "", [("f", "{}"), ("f", "{}")], own=["functions.f:0", "functions.f:1"])
    ids = [call["id"] for call in messages[-1]["tool_calls"]]
    messages += [tool(ids[1], "one"), tool(ids[0], "nought")]
    rewritten = [assistant("rewritten", (ids[0], "g", "{}"))]
    restored = restore_calls([*messages, *rewritten], recorded.tree)
    assert [call["id"] for call in restored[1]["tool_calls"]] == ["functions.f:0", "functions.f:1"]
    assert [m["tool_call_id"] for m in restored[2:4]] == ["functions.f:1", "functions.f:0"]
    assert restored[4]["tool_calls"][0]["id"] == "functions.f:0"
    assert restored[1]["tool_calls"][0]["function"] is messages[1]["tool_calls"][0]["function"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ids, "the request itself is not changed"


def test_what_has_no_own_id_stays_the_same_object():
    recorded = Recorded()
    messages = recorded.say([user("go")], "", [("f", "{}")], own=[""])
    call_id = messages[-1]["tool_calls"][0]["id"]
    messages += [tool(call_id, "out"), tool("foreign", "out"), tool("call_ffffffffffff_0", "out")]
    messages += [
        assistant("", (call_id[:-1] + "7", "f", "{}")),
        {"role": "assistant", "content": "x", "tool_calls": None},
    ]
    assert all(a is b for a, b in zip(restore_calls(messages, recorded.tree), messages, strict=True))


def test_results_of_calls_that_the_client_named_anew_answer_the_recorded_ones() -> None:
    def calls(*ids: str) -> dict[str, object]:
        return {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "type": "function"} for id_ in ids]}

    new = [{"role": "tool", "tool_call_id": "b", "content": "2"}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    new += [{"role": "tool", "tool_call_id": "x", "content": "?"}, {"role": "user", "content": "go on"}]
    answered = answer_reply(calls("a", "b"), calls("fc_1", "fc_2"), new)
    assert [message.get("tool_call_id") for message in answered] == ["fc_2", "fc_1", "x", None]
    assert answer_reply(calls("fc_1"), calls("fc_1"), new) == new
    assert answer_reply({"role": "assistant", "content": "hi"}, calls("fc_1"), new) == new
    assert [message["tool_call_id"] for message in new[:3]] == ["b", "a", "x"]
