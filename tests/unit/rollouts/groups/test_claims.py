"""Claims at a proxy of a release that knows of none; how many are renewed together."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import Gone, NotFound, StenoError
from steno.contracts.records import Group, Session
from steno.contracts.rest import Trial
from steno.contracts.runs.claims import Claim, ClaimRequest
from steno_rollouts.groups.claims import GROUPS_AT_ONCE, Claims, Taken

TRIAL = Trial(session=Session(trial_id="g.0", created_at=1.0, updated_at=1.0), urls={})


class OlderProxy:
    """A client of one. there: whether it has the group. says: to a claim."""

    def __init__(self, *, there: bool, says: StenoError | None = None) -> None:
        self.there = there
        self.says = says or NotFound("Not Found")
        self.asked: list[ClaimRequest] = []

    async def claim(self, group_id: str, asked: ClaimRequest) -> list[Claim]:
        self.asked.append(asked)
        raise self.says

    async def group(self, group_id: str) -> Group:
        if not self.there:
            raise NotFound(f"no group {group_id}")
        return Group(group_id=group_id, size=1, trial_ids=["g.0"], created_at=1.0)


async def test_every_trial_is_ones_own_and_it_is_asked_once() -> None:
    proxy = OlderProxy(there=True)
    claims = Claims(cast(AsyncClient, proxy))
    for _ in range(2):
        assert await claims.take("g", TRIAL) == Taken(TRIAL, None, mine=True)
    assert len(proxy.asked) == 1


async def test_a_group_that_is_not_there_is_no_older_release() -> None:
    with pytest.raises(NotFound, match="no group g"):
        await Claims(cast(AsyncClient, OlderProxy(there=False))).take("g", TRIAL)


async def test_a_trial_that_it_says_was_deleted_has_ended_and_is_nobodys() -> None:
    proxy = OlderProxy(there=True, says=Gone("session g.0 is closed"))
    taken = await Claims(cast(AsyncClient, proxy)).take("g", TRIAL)
    assert (taken.mine, taken.trial.session.status, taken.trial.session.end_reason) == (False, "deleted", "deleted")


class SlowProxy:
    """Answers no claim that is renewed before as many as may be are on their way."""

    def __init__(self) -> None:
        self.renews, self.under_way, self.most = False, 0, 0
        self.renewed: set[str] = set()
        self.full, self.all = asyncio.Event(), asyncio.Event()

    async def claim(self, group_id: str, asked: ClaimRequest) -> list[Claim]:
        if self.renews:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            if self.under_way == GROUPS_AT_ONCE:
                self.full.set()
            await self.full.wait()
            self.under_way -= 1
            self.renewed.add(group_id)
            if len(self.renewed) == GROUPS_AT_ONCE + 1:
                self.all.set()
        return [Claim(granted=True, epoch=1, trial=TRIAL) for _ in asked.trial_ids]


async def test_claims_of_several_groups_are_renewed_together_and_not_of_all() -> None:
    """Of hundreds one after the other, the last would run out before its turn came, and another launcher would run its trial."""
    proxy = SlowProxy()
    claims = Claims(cast(AsyncClient, proxy), ttl_s=1.0)
    for number in range(GROUPS_AT_ONCE + 1):
        session = TRIAL.session.model_copy(update={"trial_id": f"g{number}.0"})
        assert (await claims.take(f"g{number}", TRIAL.model_copy(update={"session": session}))).mine
    proxy.renews = True
    async with asyncio.timeout(30), claims.kept(lambda _: None):
        await proxy.all.wait()
    assert proxy.most == GROUPS_AT_ONCE
