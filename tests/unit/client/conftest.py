from __future__ import annotations

import asyncio

import pytest

from tests.support.waiting import own_pauses


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a client would have waited before it tried again."""
    waited = own_pauses(monkeypatch)

    async def asleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", asleep)
    return waited
