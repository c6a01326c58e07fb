"""Prompts are rendered one after another: turns before counts that wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from steno.contracts.wire.frames import Count, Generate, Started
from steno_worker.chat.chat_engine import ChatEngine
from tests.unit.worker.chat.test_job import FORMAT, STOP, Told, chat, step


class Blocked(ChatEngine):
    """Renders nothing until it may, and says in which order it did."""

    may, order = threading.Event(), list[str]()

    def _prompt(self, request: Generate) -> Any:
        assert self.may.wait(60.0)
        self.order.append(request.turn_id or "count")
        return super()._prompt(request)


async def test_a_turn_waits_behind_one_count_at_most() -> None:
    """Agents count before they ask, and each count of a long conversation takes as long as hundreds of turns' new messages."""
    engine = Blocked(Told(step([STOP], "stop")), FORMAT)
    await engine.start()

    async def begin() -> Any:
        events = engine.generate(Generate(7, "turn", 0, "t", chat()))
        try:
            return await anext(events)  # type: ignore[arg-type]
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    counts = [asyncio.create_task(engine.count(chat())) for _ in range(4)]
    counted = asyncio.create_task(engine.tokenize(Count(1, chat(), "ids")))
    await asyncio.sleep(0)  # all have asked
    turn = asyncio.create_task(begin())
    await asyncio.sleep(0)
    engine.may.set()
    assert isinstance(await turn, Started)
    assert len(set(await asyncio.gather(*counts))) == 1 and await counted
    assert engine.order == ["count", "turn", "count", "count", "count"]
    await engine.stop()
