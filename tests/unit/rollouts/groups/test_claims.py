"""Claims at a proxy of a release that knows of none."""

from __future__ import annotations

from typing import cast

import pytest

from steno.client.client import AsyncSteno
from steno.contracts.errors import Gone, NotFound, StenoError
from steno.contracts.records import Group, Session
from steno.contracts.rest import Trial
from steno.contracts.runs.claims import Claim, ClaimRequest
from steno_rollouts.groups.claims import Claims, Taken

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
    claims = Claims(cast(AsyncSteno, proxy))
    for _ in range(2):
        assert await claims.take("g", TRIAL) == Taken(TRIAL, None, mine=True)
    assert len(proxy.asked) == 1


async def test_a_group_that_is_not_there_is_no_older_release() -> None:
    with pytest.raises(NotFound, match="no group g"):
        await Claims(cast(AsyncSteno, OlderProxy(there=False))).take("g", TRIAL)


async def test_a_trial_that_it_says_was_deleted_has_ended_and_is_nobodys() -> None:
    proxy = OlderProxy(there=True, says=Gone("session g.0 is closed"))
    taken = await Claims(cast(AsyncSteno, proxy)).take("g", TRIAL)
    assert (taken.mine, taken.trial.session.status, taken.trial.session.end_reason) == (False, "deleted", "deleted")
