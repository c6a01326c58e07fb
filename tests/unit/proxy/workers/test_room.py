"""What runs of a trial counts against its limits, however many requests begin at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from steno.contracts.errors import BudgetSpent
from steno.contracts.records import Limits, Session
from steno.contracts.wire.frames import ModelCard
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.pace import LARGE_BYTES
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.service import TurnService
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.relay_settings import RelaySettings
from steno_proxy.workers.stream import Stream


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
    turns = TurnService(Recorder(store, cache_bytes=1 << 20, implicit=False), hub)
    await store.register(Session(trial_id="t", created_at=now, updated_at=now, limits=Limits(max_turns=1)))

    async def one(number: int) -> bool:
        body = {"model": "m", "messages": [{"role": "user", "content": f"hi {number}"}]}
        asked = ChatDialect().parse(json.dumps(body).encode())
        asked.body_bytes = size
        try:
            await turns.open("t", ChatDialect(), asked, Client())  # type: ignore[arg-type]
        except BudgetSpent:
            return False
        return True

    assert sorted(await asyncio.gather(*map(one, range(8)))) == [False] * 7 + [True]
