"""Clients take the white space around a reply off, or put some on: they go on from the turn that said it all the same (I2)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.integration.http.conftest import running
from tests.support.workers.parrot import ParrotEngine, Say

Item = dict[str, Any]


@pytest.mark.parametrize("kept", [str.strip, lambda text: text + "\n"], ids=["taken off", "put on"])
async def test_in_chat(kept: Any) -> None:
    """Hermes takes it off; Inspect AI adds a line end."""
    numbers = itertools.count()
    engine = ParrotEngine(lambda request: Say("\n\nI look.\n", reasoning=f"So this is {next(numbers)}."))
    async with running(engine) as proxy:
        history: list[Item] = [{"role": "user", "content": "fix it"}]
        for _ in range(4):
            said = (await proxy.chat("t", *history)).json()["choices"][0]["message"]
            history += [{"role": "assistant", "content": kept(said["content"])}, {"role": "user", "content": "go on"}]
        turns = await proxy.turns("t", 4)
    assert [turn.fork_reason for turn in turns] == [None] * 4
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [turn.options.get("echoed_as") for turn in turns] == [None, *["space"] * 3]
    given = [message for message in engine.requests[-1].job.messages if message["role"] == "assistant"]
    assert [message["content"] for message in given] == ["\n\nI look.\n"] * 3
    assert [message["reasoning_content"] for message in given] == [f"So this is {i}." for i in range(3)]


async def test_in_responses() -> None:
    """OpenHands' SDK takes it off, and sends items without their ids."""
    engine = ParrotEngine(lambda request: Say("\n\nI look.\n", reasoning="So."))
    async with running(engine) as proxy:
        history: list[Item] = [{"role": "user", "content": "fix it"}]
        for _ in range(3):
            answer = await proxy.http.post("/t/v1/responses", json={"model": "m", "input": history})
            [text] = [item["content"][0]["text"] for item in answer.json()["output"] if item["type"] == "message"]
            history += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": "go on"}]
        turns = await proxy.turns("t", 3)
    assert [(turn.fork_reason, turn.options.get("echoed_as")) for turn in turns] == [
        (None, None),
        *[(None, "space")] * 2,
    ]
