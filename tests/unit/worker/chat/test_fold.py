"""Roles that a template can't take, folded as the table in `fold` says."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.chat import Message
from steno_worker.chat.check import check_format
from steno_worker.chat.fold import MessageFolding, probe, short_call_id
from tests.unit.worker.chat.families import FAMILIES, TOKENIZERS, TOOLS, chat_format


def say(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


S, U, A = say("system", "s"), say("user", "u"), say("assistant", "a")
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0123456789ab_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
T: Message = {"role": "tool", "content": "t", "tool_call_id": "call_0123456789ab_0"}


@pytest.mark.parametrize(
    ("folding", "messages", "folded"),
    [
        (MessageFolding(), [S, S, U, U, A, S, T, U], [S, S, U, U, A, S, T, U]),
        (MessageFolding(no_system=True), [S, S, U], [say("user", "s\n\ns\n\nu")]),
        (MessageFolding(no_system=True), [S, A], [say("user", "s"), A]),
        (MessageFolding(no_system=True), [U, A, S, U], [U, A, say("user", "s"), U]),
        (MessageFolding(one_system=True), [S, S, U, S], [say("system", "s\n\ns"), U, S]),
        (MessageFolding(late_system=True), [S, U, A, S, U], [S, U, A, say("user", "s"), U]),
        (MessageFolding(late_system=True, user_after_user=True), [U, S, U, A], [say("user", "u\n\ns\n\nu"), A]),
        (MessageFolding(user_after_tool=True, late_system=True), [T, U, S], [{**T, "content": "t\n\nu\n\ns"}]),
        (MessageFolding(user_after_user=True), [U, say("user", "")], [U]),
        (
            MessageFolding(user_after_user=True),
            [U, say("user", [{"type": "text", "text": "v"}])],
            [say("user", [{"type": "text", "text": text} for text in ("u", "\n\n", "v")])],
        ),
    ],
)
def test_table(folding: MessageFolding, messages: list[Message], folded: list[Message]) -> None:
    before = [dict(message) for message in messages]
    assert folding.apply(messages) == folded
    assert messages == before


def test_folding_what_is_new_is_folding_the_whole() -> None:
    folding = MessageFolding(one_system=True, late_system=True, user_after_user=True, user_after_tool=True)
    old, new = [S, S, U, U, A], [U, S, U, CALL, T, U, S]
    assert folding.apply([*old, *new]) == [*folding.apply(old), *folding.apply([A, *new])[1:]]


def test_short_call_ids_agree_between_call_and_result() -> None:
    call, result = MessageFolding(short_call_ids=True).apply([CALL, T])
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == short_call_id("call_0123456789ab_0")
    assert len(result["tool_call_id"]) == 9 and short_call_id("abcdefgh1") == "abcdefgh1"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_each_family_needs(kind: str) -> None:
    needs = {family: check_format(chat_format(family, kind)).folding for family in FAMILIES}
    assert needs["chatml"] == needs["qwen3"] == needs["llama3"] == MessageFolding()
    assert needs["deepseek"] == needs["glm"] == MessageFolding(late_system=True)
    assert needs["mistral"] == MessageFolding(
        one_system=True, late_system=True, user_after_user=True, user_after_tool=True, short_call_ids=True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_conversations_are_taken_by_every_family(family: str) -> None:
    format = chat_format(family)
    folding = probe(format)
    messages = [S, say("system", "second"), U, say("user", "twice"), CALL, T, say("user", "after"), A, S, U, U]
    text = format.decoder().feed(format.render(folding.apply(messages), TOOLS, {}), final=True)
    assert all(word in text for word in ("second", "twice", "after"))
