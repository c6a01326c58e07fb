"""What runs of a trial counts against its limits, however many requests begin at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from proxy.contracts.errors import BudgetSpent
from proxy.contracts.frames import ModelCard
from proxy.contracts.records import Limits, Session
from proxy.dialects.chat import Chat
from proxy.hub import Hub, RelaySettings
from proxy.pace import LARGE_BYTES
from proxy.recorder import Recorder
from proxy.store.memory import MemoryStore
from proxy.streams import Stream
from proxy.turn import Turns


class Client:
    gone = False

    def ready(self) -> None:
        pass


@pytest.mark.parametrize("size", [100, LARGE_BYTES], ids=["small", "large"])
async def test_of_requests_that_begin_at_once_no_more_run_than_may(size: int) -> None:
    """Large ones give others a turn while they are opened."""
    store, now, numbers = MemoryStore(), time.time(), itertools.count(1)
    hub = Hub(RelaySettings(), proxy_id="p")
    hub.open = lambda order: Stream(  # type: ignore[method-assign]
        next(numbers), "w", ModelCard("m", 4096), 4096, 0, lambda frame: None, lambda number: None
    )
    turns = Turns(Recorder(store, cache_bytes=1 << 20, implicit=False), hub)
    await store.register(Session(trial_id="t", created_at=now, updated_at=now, limits=Limits(max_turns=1)))

    async def one(number: int) -> bool:
        body = {"model": "m", "messages": [{"role": "user", "content": f"hi {number}"}]}
        asked = Chat().parse(json.dumps(body).encode())
        asked.body_bytes = size
        try:
            await turns.open("t", Chat(), asked, Client())  # type: ignore[arg-type]
        except BudgetSpent:
            return False
        return True

    assert sorted(await asyncio.gather(*map(one, range(8)))) == [False] * 7 + [True]
