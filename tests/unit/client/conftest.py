from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.waiting import own_pauses


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a client would have waited before it tried again."""
    waited = own_pauses(monkeypatch)
    sleep, this = asyncio.sleep, threading.get_ident()

    async def asleep(seconds: float) -> None:
        if threading.get_ident() != this:  # of a thread that an earlier test has left
            await sleep(seconds)
        else:
            waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", asleep)
    return waited
