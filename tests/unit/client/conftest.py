from __future__ import annotations

import asyncio
import threading
import time

import pytest

from steno.client import client as module


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a client would have waited before it tried again. Other threads of this process do wait."""
    waited: list[float] = []
    sleep, this = time.sleep, threading.get_ident()

    def pause(seconds: float) -> None:
        waited.append(seconds) if threading.get_ident() == this else sleep(seconds)

    async def asleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module.time, "sleep", pause)
    monkeypatch.setattr(asyncio, "sleep", asleep)
    return waited
