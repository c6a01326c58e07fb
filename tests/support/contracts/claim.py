"""What every store promises of claims: which launcher has a trial, until when, and what is refused to one that has lost it."""

from __future__ import annotations

import asyncio

import pytest

from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import Session
from steno_proxy.store.claims import TrialClaim
from steno_proxy.store.interface import SessionStore
from tests.support.records.groups import speak
from tests.support.records.recordings import session


async def complete(store: SessionStore, reward: float | None, claim: int | None, *, final: bool = True) -> Session:
    ended = {"status": "completed", "end_reason": "harness", "metrics": {}, "now": 50.0}
    return await store.complete("t", reward=reward, claim=claim, final=final, **ended)  # type: ignore[arg-type]


class ClaimContract:
    async def test_a_trial_is_one_launchers_until_its_claim_runs_out(self, store: SessionStore) -> None:
        await store.register(session("t"))
        _, first = await store.claim("t", "one", 60.0, now=10.0)
        assert first == (TrialClaim(1, "one", 70.0), True, False)
        _, refused = await store.claim("t", "two", 60.0, now=69.5)
        assert refused == (TrialClaim(1, "one", 70.0), False, False)
        _, renewed = await store.claim("t", "one", 60.0, now=69.75)
        assert renewed == (TrialClaim(1, "one", 129.75), True, False)
        assert not (await store.claim("t", "two", 60.0, now=129.5))[1].granted
        found, taken = await store.claim("t", "two", 30.0, now=129.75)
        assert taken == (TrialClaim(2, "two", 159.75), True, True)
        assert found.key_generation == 2 == (await store.session("t")).key_generation, "the first one's agents are out"
        assert not (await store.claim("t", "one", 60.0, now=130.0))[1].granted

    async def test_a_late_launcher_goes_on_where_nobody_took_over(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 5.0, now=10.0)
        found, again = await store.claim("t", "one", 5.0, now=1000.0)
        assert again == (TrialClaim(1, "one", 1005.0), True, False) and found.key_generation == 1

    async def test_one_that_is_known_to_be_gone_is_taken_over_from_at_once(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 60.0, now=10.0)
        assert not (await store.claim("t", "two", 60.0, now=11.0, gone=["another"]))[1].granted
        assert (await store.claim("t", "two", 60.0, now=11.0, gone=["another", "one"]))[1].claim.epoch == 2

    async def test_a_launcher_takes_over_from_itself_where_what_it_ran_is_lost(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 60.0, now=10.0)
        found, again = await store.claim("t", "one", 60.0, now=20.0, gone=["one"])
        assert again == (TrialClaim(2, "one", 80.0), True, True)
        assert found.key_generation == 2 == (await store.session("t")).key_generation, "what is lost is out"
        assert (await store.claim("t", "one", 60.0, now=21.0))[1] == (TrialClaim(2, "one", 81.0), True, False)

    async def test_who_has_lost_a_trial_can_neither_end_it_nor_post_a_reward_later(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 5.0, now=10.0)
        await store.claim("t", "two", 60.0, now=20.0)
        with pytest.raises(Conflict, match="got claim 1, the newest is 2") as refused:
            await complete(store, 1.0, claim=1)
        assert refused.value.field == "claim" and (await store.session("t")).status == "open"
        await complete(store, None, claim=2)
        with pytest.raises(Conflict):
            await complete(store, 1.0, claim=1)
        assert (await complete(store, None, claim=2)).reward is None, "the same again"
        assert (await complete(store, 0.5, claim=None)).reward == 0.5, "of an operator"

    async def test_nobody_gets_a_trial_that_has_ended(self, store: SessionStore) -> None:
        with pytest.raises(NotFound):
            await store.claim("t", "one", 60.0, now=10.0)
        await store.register(session("t"))
        await store.claim("t", "one", 60.0, now=10.0)
        await speak(store, "t", 3)
        await complete(store, 1.0, claim=1)
        found, refused = await store.claim("t", "two", 60.0, now=100.0)
        assert not refused.granted and (found.status, found.counts.turns, found.key_generation) == ("completed", 1, 1)
        await store.delete("t", now=100.0, tombstone_s=60.0)
        with pytest.raises(Gone):
            await store.claim("t", "two", 60.0, now=100.0)

    async def test_a_trial_that_awaits_its_reward_is_for_whoever_scores_it(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 60.0, now=10.0)
        await complete(store, None, claim=1, final=False)
        found, taken = await store.claim("t", "two", 60.0, now=11.0)
        assert taken == (TrialClaim(2, "two", 71.0), True, False), "whoever ran it lets go of it with its end"
        assert found.awaits_reward and found.key_generation == 1, "nothing of it runs"
        assert (await store.claim("t", "two", 60.0, now=12.0))[1] == (TrialClaim(2, "two", 72.0), True, False)
        assert not (await store.claim("t", "one", 60.0, now=71.75))[1].granted
        with pytest.raises(Conflict, match="got claim 1, the newest is 2"):
            await complete(store, 1.0, claim=1)
        scored = await complete(store, 0.5, claim=2)
        assert (scored.reward, scored.awaits_reward) == (0.5, False)
        assert not (await store.claim("t", "two", 60.0, now=13.0))[1].granted

    async def test_whoever_runs_a_trial_that_its_limit_ended_keeps_it(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "one", 60.0, now=10.0)
        await complete(store, None, claim=None, final=False)
        assert not (await store.claim("t", "two", 60.0, now=11.0))[1].granted
        assert (await store.claim("t", "one", 60.0, now=12.0))[1].granted
        await complete(store, None, claim=1, final=False)
        assert (await store.claim("t", "two", 60.0, now=13.0))[1] == (TrialClaim(2, "two", 73.0), True, False)

    async def test_of_many_at_once_one_gets_it(self, store: SessionStore) -> None:
        await store.register(session("t"))
        await store.claim("t", "lost", 1.0, now=1.0)
        asked = [store.claim("t", f"launcher-{number}", 60.0, now=10.0) for number in range(8)]
        found = [claimed for _, claimed in await asyncio.gather(*asked)]
        assert [claimed.granted for claimed in found].count(True) == 1
        assert {claimed.claim for claimed in found} == {next(each.claim for each in found if each.granted)}
        assert (await store.session("t")).key_generation == 2
