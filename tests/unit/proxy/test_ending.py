"""Tasks that go on until they are cancelled, and lose a cancellation now and then."""

from __future__ import annotations

import asyncio

import pytest

from steno_proxy import ending


async def deaf(times: int) -> None:
    while True:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_task_that_loses_its_cancellation_is_cancelled_again(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "AGAIN_S", 0.01)
    tasks = [asyncio.create_task(deaf(times)), asyncio.create_task(asyncio.sleep(0))]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await ending.end(tasks)
        await ending.end([])
    assert tasks[0].cancelled()
