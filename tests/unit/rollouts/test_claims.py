"""Claims at a proxy of a release that knows of none."""

from __future__ import annotations

from typing import cast

import pytest

from steno.client.client import AsyncSteno
from steno.contracts.errors import NotFound
from steno.contracts.records import Group, Session
from steno.contracts.rest import Trial
from steno.contracts.runs.claims import Claim, ClaimRequest
from steno_rollouts.claims import Claims

TRIAL = Trial(session=Session(trial_id="g.0", created_at=1.0, updated_at=1.0), urls={})


class OlderProxy:
    """A client of one. there: whether it has the group."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self.asked: list[ClaimRequest] = []

    async def claim(self, group_id: str, asked: ClaimRequest) -> list[Claim]:
        self.asked.append(asked)
        raise NotFound("Not Found")

    async def group(self, group_id: str) -> Group:
        if not self.there:
            raise NotFound(f"no group {group_id}")
        return Group(group_id=group_id, size=1, trial_ids=["g.0"], created_at=1.0)


async def test_every_trial_is_ones_own_and_it_is_asked_once() -> None:
    proxy = OlderProxy(there=True)
    claims = Claims(cast(AsyncSteno, proxy))
    for _ in range(2):
        assert await claims.take("g", TRIAL) == (TRIAL, None, True)
    assert len(proxy.asked) == 1


async def test_a_group_that_is_not_there_is_no_older_release() -> None:
    with pytest.raises(NotFound, match="no group g"):
        await Claims(cast(AsyncSteno, OlderProxy(there=False))).take("g", TRIAL)
