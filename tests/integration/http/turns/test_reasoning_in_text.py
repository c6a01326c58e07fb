"""A client that keeps a reply's reasoning in its text, between tags, goes on from the turn that said it (I2): gptme does so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.integration.http.conftest import running
from tests.support.workers.parrot import ParrotEngine, Say

SHELL = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
CALL = ("own", "shell", '{"command": "ls"}')


def kept(reply: dict[str, Any]) -> dict[str, Any]:
    """What such a client makes of a reply. It puts a line end before calls."""
    calls = {"tool_calls": reply["tool_calls"]} if "tool_calls" in reply else {}
    text = f"<think>\n{reply['reasoning_content']}\n</think>\n\n{reply['content']}" + "\n" * bool(calls)
    return {"role": "assistant", "content": [{"type": "text", "text": text}], **calls}


def answer_to(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message:
        return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}
    return {"role": "user", "content": "go on"}


@pytest.mark.parametrize("calls", [[], [CALL]], ids=["text", "calls"])
async def test_every_turn_goes_on_from_the_one_before(calls: list[tuple[str, str, str]]) -> None:
    numbers = itertools.count()
    engine = ParrotEngine(lambda request: Say("I look.", reasoning=f"So this is {next(numbers)}.", calls=calls))
    async with running(engine) as proxy:
        history: list[dict[str, Any]] = [{"role": "user", "content": "fix it"}]
        for _ in range(4):
            answer = await proxy.chat("t", *history, tools=SHELL)
            history.append(kept(answer.json()["choices"][0]["message"]))
            history.append(answer_to(history[-1]))
        turns = await proxy.turns("t", 4)
    assert [turn.fork_reason for turn in turns] == [None] * 4
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [turn.options.get("echoed_as") for turn in turns] == [None, *["reasoning"] * 3]
    given = [message["content"] for message in engine.requests[-1].job.messages if message["role"] == "assistant"]
    assert given == ["I look."] * 3, "the replies stand in a prompt as they were recorded"


async def test_other_reasoning_than_what_was_recorded_is_a_rewrite() -> None:
    engine = ParrotEngine(lambda request: Say("I look.", reasoning="So."))
    async with running(engine) as proxy:
        history = [{"role": "user", "content": "fix it"}]
        await proxy.chat("t", *history)
        said = {"role": "assistant", "content": "<think>\nSo not.\n</think>\n\nI look."}
        await proxy.chat("t", *history, said, {"role": "user", "content": "go on"})
        first, second = await proxy.turns("t", 2)
    assert (first.fork_reason, second.fork_reason, second.parent_id) == (None, "assistant_rewritten", None)
