"""What every store promises of requests that clients send again, to several replicas: a part of the store's contract."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from steno.contracts.errors import Gone, NotFound
from steno.contracts.records import OPEN
from steno_proxy.store.interface import RetryKey, SessionStore
from steno_proxy.store.retries import MOST_PLACES, MOST_REFUSALS, REFUSED_S
from tests.support.records.recordings import row, session, turn

KEY, OTHER = b"k" * 16, b"o" * 16
ASKED = RetryKey(KEY)


class Trial:
    """Turns of one request, by the time at which they began."""

    def __init__(self, store: SessionStore, trial_id: str) -> None:
        self.store = store
        self.trial_id = trial_id
        self.made: dict[str, float] = {}

    async def again(self, began: float, count: int = 1, *, key: bytes = KEY, n: int = 1) -> bool:
        return await self.store.asked_again(self.trial_id, key, began=began, count=count, n=n, now=began)

    async def refused(self, began: float, *, key: bytes = KEY, now: float | None = None) -> None:
        await self.store.refused(self.trial_id, key, began=began, now=began if now is None else now)

    async def commit(
        self, began: float, retry_key: RetryKey | None = ASKED, *, partial: bool = False, **fields: Any
    ) -> str:
        ended = {"partial": True, "finish_reason": "cancelled"} if partial else {}
        one = turn(len(self.made), **(ended | fields))
        one.timings.queued = began
        self.made[one.turn_id] = began
        await self.store.commit(self.trial_id, one, row(one), now=began + 1.0, retry_key=retry_key)
        return str(one.turn_id)

    async def record(self) -> dict[float, float | None]:
        """When each turn began -> when the turn that superseded it began. Checks that such a turn says which turn it retries."""
        turns = await self.store.turns(self.trial_id)
        by_id = {one.turn_id: one for one in turns}
        for one in turns:
            if one.retry_of is not None:
                assert by_id[one.retry_of].superseded_by is not None
            assert one.superseded_by is None or by_id[one.superseded_by].retry_of is not None
        return {self.made[one.turn_id]: self.made[one.superseded_by] if one.superseded_by else None for one in turns}


async def trial(store: SessionStore, name: str) -> Trial:
    await store.register(session(name))
    return Trial(store, name)


class RetryContract:
    @pytest.mark.parametrize("partial", [False, True])
    @pytest.mark.parametrize("first", ["attempt", "retry"])
    async def test_whichever_is_recorded_first_the_retry_supersedes(
        self, store: SessionStore, partial: bool, first: str
    ) -> None:
        one = await trial(store, f"elsewhere-{first}-{partial}")
        assert not await one.again(2.0)
        if first == "attempt":
            await one.commit(1.0, partial=partial)
            assert await one.record() == {1.0: None}, "the retry may yet come to nothing"
            await one.commit(2.0)
        else:
            await one.commit(2.0)
            await one.commit(1.0, partial=partial)
        assert await one.record() == {1.0: 2.0, 2.0: None}

    @pytest.mark.parametrize("order", list(permutations([1.0, 2.0, 3.0])))
    async def test_of_an_attempt_and_two_retries_the_last_one_stands(
        self, store: SessionStore, order: tuple[float, ...]
    ) -> None:
        one = await trial(store, "three-" + "-".join(map(str, order)))
        await one.again(2.0, 1)
        await one.again(3.0, 2)
        for began in order:
            await one.commit(began, partial=began < 3.0)
        assert [began for began, by in (await one.record()).items() if by is None] == [3.0]

    @pytest.mark.parametrize("order", list(permutations([1.0, 2.0, 3.0])))
    async def test_of_two_siblings_a_retry_is_of_one(self, store: SessionStore, order: tuple[float, ...]) -> None:
        one = await trial(store, "siblings-" + "-".join(map(str, order)))
        await one.again(3.0)
        for began in order:
            await one.commit(began)
        found = await one.record()
        assert sorted(found.values(), key=str) == [3.0, None, None] and found[3.0] is None

    async def test_of_two_that_came_before_it_the_one_that_broke_is_meant(self, store: SessionStore) -> None:
        one = await trial(store, "broke")
        await one.again(4.0)
        await one.commit(1.0)
        await one.commit(2.0, partial=True)
        await one.commit(3.0, partial=True)
        await one.commit(4.0)
        assert await one.record() == {1.0: None, 2.0: 4.0, 3.0: None, 4.0: None}

    async def test_two_siblings_own_retries_are_siblings(self, store: SessionStore) -> None:
        one = await trial(store, "both")
        await one.again(3.0, 1)
        await one.again(4.0, 1)
        for began in (3.0, 1.0, 4.0, 2.0):
            await one.commit(began, partial=began < 3.0)
        assert await one.record() == {1.0: 3.0, 2.0: 4.0, 3.0: None, 4.0: None}

    async def test_a_retry_of_what_is_on_record_takes_earlier_retries_along_and_no_siblings(
        self, store: SessionStore
    ) -> None:
        one = await trial(store, "found")
        broke = await one.commit(1.0, partial=True)
        await one.again(3.0, 1)
        await one.again(4.0, 2)
        await one.commit(2.0)  # a sibling
        await one.commit(4.0, RetryKey(KEY, True), retry_of=broke)
        await one.commit(3.0, RetryKey(KEY, True), partial=True, retry_of=broke)
        assert await one.record() == {1.0: 3.0, 2.0: None, 3.0: 4.0, 4.0: None}

    async def test_what_began_after_a_retry_is_no_attempt_of_it_nor_is_another_request(
        self, store: SessionStore
    ) -> None:
        one = await trial(store, "later")
        await one.again(2.0)
        await one.commit(2.0)
        await one.commit(3.0)
        await one.commit(1.0, RetryKey(OTHER))
        await one.commit(1.5, None)
        await one.commit(1.75, choice=1, answer_id="a" * 12)
        assert set((await one.record()).values()) == {None}

    async def test_choices_pair_by_their_place(self, store: SessionStore) -> None:
        one = await trial(store, "choices")
        await one.again(2.0, n=2)
        made = [await one.commit(2.0, choice=choice, answer_id="b" * 12) for choice in (0, 1)]
        old = [await one.commit(1.0, choice=choice, answer_id="a" * 12) for choice in (1, 0)]
        turns = {found.turn_id: found for found in await store.turns("choices")}
        assert [turns[turn_id].retry_of for turn_id in made] == old[::-1]
        assert [turns[turn_id].superseded_by for turn_id in old] == made[::-1]

    async def test_a_turn_that_is_saved_while_open_is_paired_once(self, store: SessionStore) -> None:
        one = await trial(store, "open")
        await one.again(3.0)
        attempt = turn(0, partial=True, finish_reason=OPEN)
        attempt.timings.queued = 1.0
        one.made[attempt.turn_id] = 1.0
        for ended in ({}, {"finish_reason": "stop", "partial": False}, {"finish_reason": "stop", "partial": False}):
            now = attempt.model_copy(update=ended)
            await store.commit("open", now, row(now), now=2.0, retry_key=ASKED)
        await one.commit(3.0)
        await one.commit(2.0)
        assert await one.record() == {1.0: 3.0, 3.0: None, 2.0: None}

    async def test_a_refusal_counts_for_one_retry_of_its_request_and_not_for_ever(self, store: SessionStore) -> None:
        one = await trial(store, "refused")
        await one.refused(1.0)
        await one.refused(1.5)
        assert not await one.again(2.0, key=OTHER)
        assert [await one.again(2.0), await one.again(2.5), await one.again(3.0)] == [True, True, False]
        other = await trial(store, "refused-too")
        await other.refused(1.0)
        assert not await other.again(1.0 + REFUSED_S)
        await store.refused("nobody", KEY, began=1.0, now=1.0)

    async def test_a_retry_that_was_refused_before_supersedes_nothing(self, store: SessionStore) -> None:
        one = await trial(store, "new")
        await one.refused(1.5)
        assert await one.again(2.0)
        await one.commit(1.0)
        await one.commit(2.0)
        assert await one.record() == {1.0: None, 2.0: None}

    async def test_what_ends_with_nothing_after_its_retry_came_is_no_refusal_of_that(self, store: SessionStore) -> None:
        one = await trial(store, "left")
        await one.again(2.0, 1)
        await one.refused(1.0, now=3.0)
        assert not await one.again(4.0, 2)

    async def test_refusals_are_bounded(self, store: SessionStore) -> None:
        one = await trial(store, "many")
        for i in range(MOST_REFUSALS + 1):
            await one.refused(1.0, key=i.to_bytes(16, "little"))
        keys = ((0).to_bytes(16, "little"), MOST_REFUSALS.to_bytes(16, "little"))
        assert [await one.again(2.0, key=key) for key in keys] == [True, False]

    async def test_retries_of_further_requests_are_not_noted_when_there_are_very_many(
        self, store: SessionStore
    ) -> None:
        one, most = await trial(store, "all-retries"), MOST_PLACES // 128
        keys = [i.to_bytes(16, "little") for i in range(most + 1)]
        for key in keys:
            await one.again(2.0, key=key, n=128)
        for number, key in enumerate((keys[0], keys[-1])):
            for began in (1.0, 2.0):
                await one.commit(began + number / 10, RetryKey(key))
        assert await one.record() == {1.0: 2.0, 2.0: None, 1.1: None, 2.1: None}
        assert not await one.again(3.0, 2, key=keys[0])
        await one.commit(2.5, RetryKey(keys[0]))
        await one.commit(3.0, RetryKey(keys[0]))
        assert (await one.record())[2.5] == 3.0

    async def test_nothing_is_noted_of_a_trial_that_is_gone_or_never_was(self, store: SessionStore) -> None:
        one = await trial(store, "gone")
        await one.refused(1.0)
        await store.delete("gone", now=2.0, tombstone_s=60.0)
        await one.refused(3.0)
        with pytest.raises(Gone):
            await one.again(4.0)
        with pytest.raises(NotFound):
            await store.asked_again("nobody", KEY, began=1.0, count=1, n=1, now=1.0)
