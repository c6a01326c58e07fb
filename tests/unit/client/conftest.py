from __future__ import annotations

import asyncio

import pytest

from steno.client import client as module


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a client would have waited before it tried again."""
    waited: list[float] = []

    async def asleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module.time, "sleep", waited.append)
    monkeypatch.setattr(asyncio, "sleep", asleep)
    return waited
