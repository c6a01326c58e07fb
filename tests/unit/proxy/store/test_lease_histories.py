"""Whatever happens in whatever order, the ledger balances and no group has two holders (I4): random histories in memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from steno_proxy.store.memory.store import MemoryStore
from tests.support.contracts.lease_history import STEPS, Play, Step, history


@settings(max_examples=300)
@given(STEPS)
async def test_the_ledger_balances(steps: list[Step]) -> None:
    await Play(MemoryStore()).run(steps)


@pytest.mark.parametrize(
    "seeds", [range(first, first + 50) for first in range(0, 300, 50)], ids=lambda seeds: f"from-{seeds[0]}"
)
async def test_the_ledger_balances_after_long_histories(seeds: range) -> None:
    for seed in seeds:
        await Play(MemoryStore()).run(history(seed))
