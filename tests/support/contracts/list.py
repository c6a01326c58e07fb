"""What every session store promises of groups and of lists of sessions: filters, pages, cursors. Part of `store_contract`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from steno.contracts.errors import BadRequest, Conflict, Gone, NotFound
from steno.contracts.records import Group, Session
from steno_proxy.store.facets import SessionFilter
from steno_proxy.store.interface import SessionStore
from tests.support.contracts.recording import END
from tests.support.records.recordings import session

OF_R = SessionFilter(run_id="r")
ALL: dict[str, Any] = {"status": None, "group_id": None, "since": None, "until": None, "cursor": None, "limit": 100}


async def listed(store: SessionStore, **filters: Any) -> list[str]:
    return [found.trial_id for found in (await store.list_sessions(**(ALL | filters))).items]


def make_group(
    group_id: str, size: int, *, prefix: str = "", created_at: float = 7.0, run_id: str = "r"
) -> tuple[Group, list[Session]]:
    names = [f"{prefix or group_id}-{number}" for number in range(size)]
    group = Group(
        group_id=group_id, run_id=run_id, task={"repo": "x"}, size=size, trial_ids=names, created_at=created_at
    )
    return group, [session(name, created_at=created_at, group_id=group_id, run_id=run_id) for name in names]


class ListContract:
    async def test_a_group_is_created_with_its_sessions(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 4)
        assert await store.create_group(group, sessions) == group
        assert await store.group("g1") == group
        assert await listed(store, group_id="g1") == group.trial_ids

    async def test_the_same_group_again_returns_the_recorded_one(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 3)
        await store.create_group(group, sessions)
        again, others = make_group("g1", 3, prefix="other", created_at=99.0)
        assert await store.create_group(again, others) == group
        assert await listed(store) == group.trial_ids
        with pytest.raises(Conflict, match=r"group g1 is registered already, with other values of: run_id, size$"):
            await store.create_group(group.model_copy(update={"size": 5, "run_id": "another"}), sessions)

    async def test_an_interrupted_creation_of_a_group_can_be_repeated(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 4)
        await store.create_group(group, sessions)
        await store.complete("g1-0", status="completed", **END)
        await store.expire(now=100.0, retention_s=1.0)  # one of them is not there (any more)
        await store.create_group(group, sessions)
        assert await listed(store, group_id="g1", status="open") == group.trial_ids

    async def test_a_group_of_which_a_session_was_deleted_can_be_created_again(self, store: SessionStore) -> None:
        """As by the next start of its run, or by another launcher."""
        group, sessions = make_group("g1", 3)
        await store.create_group(group, sessions)
        await store.delete("g1-1", now=time.time(), tombstone_s=600.0)
        assert await store.create_group(group, sessions) == group
        assert await listed(store, group_id="g1") == ["g1-0", "g1-2"]
        for trial_id in ("g1-0", "g1-2"):
            await store.delete(trial_id, now=time.time(), tombstone_s=600.0)
        for _ in range(2):
            with pytest.raises(Gone):
                await store.create_group(group, sessions)

    async def test_a_group_goes_with_the_last_of_its_sessions(self, store: SessionStore) -> None:
        group, sessions = make_group("g1", 2)
        await store.create_group(group, sessions)
        await store.delete("g1-0", now=1.0, tombstone_s=60.0)
        assert await store.group("g1") == group
        await store.delete("g1-1", now=1.0, tombstone_s=60.0)
        with pytest.raises(NotFound):
            await store.group("g1")

    async def test_lists_are_in_order_of_creation_and_filtered(self, store: SessionStore) -> None:
        for number, trial_id in enumerate(("c", "a", "b")):
            await store.register(
                session(
                    trial_id, created_at=100.0 + number, group_id="g" if trial_id != "a" else None,
                    run_id="r" if trial_id != "b" else None,
                )
            )  # fmt: skip
        await store.complete("c", status="completed", **END)
        await store.complete("a", status="aborted", **END)
        assert await listed(store) == ["c", "a", "b"]
        assert await listed(store, status="open") == ["b"]
        assert await listed(store, status="completed", group_id="g") == ["c"]
        assert await listed(store, group_id="g") == ["c", "b"]
        assert await listed(store, since=101.0) == ["a", "b"]
        assert await listed(store, until=102.0) == ["c", "a"]
        assert await listed(store, since=101.0, until=102.0) == ["a"]
        assert await listed(store, wanted=OF_R) == ["c", "a"]
        assert await listed(store, wanted=OF_R, status="aborted") == ["a"]
        assert await listed(store, newest_first=True) == ["b", "a", "c"]
        assert await listed(store, newest_first=True, since=101.0, until=102.0, wanted=OF_R) == ["a"]
        assert (await store.stats())["sessions"] == {"open": 1, "completed": 1, "aborted": 1}

    async def test_sessions_are_found_by_what_they_came_to(self, store: SessionStore) -> None:
        """By run, agent, end reason, reward and marks; also once one of these has changed, and not once they are gone."""

        async def found(**wanted: Any) -> list[str]:
            return await listed(store, wanted=SessionFilter(**wanted), newest_first=True)

        for number, (run_id, agent) in enumerate(
            [("r", "pi"), ("r", "\ud800"), ("s", "pi"), (None, ["pi"]), (None, None)]
        ):
            metadata = {} if agent is None else {"agent": agent}
            await store.register(
                session(f"t{number}", created_at=100.0 + number, run_id=run_id, metadata=metadata, group_id="g")
            )
        assert await found(run_id="r") == ["t1", "t0"] and await found(agent="pi") == ["t2", "t0"], (
            "while they are open"
        )
        await store.add_marks("t0", ["synthetic"])
        assert await found(mark="synthetic") == ["t0"], "marked while it is open"
        await store.complete("t0", status="completed", **END)
        await store.complete("t1", status="completed", **END | {"reward": 0.25, "end_reason": "timeout"})
        await store.complete("t2", status="aborted", **END | {"reward": None, "end_reason": "max_wall_s"}, final=False)
        assert await found(mark="synthetic") == ["t0"], "and found by that once it has ended"
        assert await found(min_reward=0.25) == ["t1", "t0"] and await found(max_reward=0.25) == ["t1"]
        assert await found(end_reason="max_wall_s") == ["t2"] and await found(min_reward=0.0, agent="pi") == ["t0"]
        await store.complete("t2", status="aborted", **END | {"reward": 0.0})
        assert await found(min_reward=0.0, max_reward=0.0) == ["t2"], "a reward that came later"
        await store.add_marks("t2", ["text_only", "synthetic"])
        assert await found(mark="synthetic") == ["t2", "t0"] and await found(mark="text_only", run_id="r") == []
        assert await listed(store, wanted=SessionFilter(mark="synthetic"), status="completed", group_id="g") == ["t0"]
        await store.delete("t2", now=60.0, tombstone_s=600.0)
        assert await found(agent="pi") == ["t0"]
        assert await store.expire(now=END["now"] + 100.0, retention_s=10.0) == 2
        assert await found(run_id="r") == [] and await found(mark="synthetic") == []
        await store.register(session("t0", created_at=200.0, run_id="r", metadata={"agent": "pi"}))
        assert await found(run_id="r") == ["t0"] and await found(mark="synthetic") == [], "a later life begins anew"

    async def test_a_page_ends_when_enough_were_looked_at_and_the_next_goes_on(self, store: SessionStore) -> None:
        agents = [{"agent": "pi" if number % 300 == 7 else "codex"} for number in range(1200)]
        made = (session(f"t{n:04}", created_at=float(n), metadata=agent) for n, agent in enumerate(agents))
        await asyncio.gather(*map(store.register, made))
        expected = ["t0907", "t0607", "t0307", "t0007"]
        for limit, most_looked in ((100, None), (100, 1), (2, 600), (1, None)):
            seen, cursor, looked = [], None, 0
            while True:
                page = await store.list_sessions(
                    **(ALL | {"limit": limit, "cursor": cursor}),
                    wanted=SessionFilter(agent="pi"), newest_first=True, most_looked=most_looked,
                )  # fmt: skip
                seen += [one.trial_id for one in page.items]
                assert len(page.passed) == len(page.items) <= limit and list(page.passed) == sorted(page.passed)
                for one, passed in zip(page.items, page.passed, strict=True):
                    assert one.trial_id == f"t{1200 - looked - passed:04}"
                looked += page.looked
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert (seen, looked) == (expected, 1200), (limit, most_looked)

    async def test_pages_neither_skip_nor_repeat_under_inserts(self, store: SessionStore) -> None:
        for number in range(0, 60, 2):
            await store.register(session(f"t{number:03}", created_at=1.0 + number // 20))
        seen: list[str] = []
        cursor = None
        for page in range(100):
            found = await store.list_sessions(**(ALL | {"cursor": cursor, "limit": 7}))
            seen += [one.trial_id for one in found.items]
            await store.register(session(f"early{page:03}", created_at=0.5))
            await store.register(session(f"t{2 * page + 1:03}", created_at=1.0 + (2 * page + 1) // 20))
            if found.items:
                await store.complete(found.items[0].trial_id, status="completed", **END)
            cursor = found.next_cursor
            if cursor is None:
                break
        assert seen == sorted(set(seen))
        assert {f"t{number:03}" for number in range(0, 60, 2)} <= set(seen)

    async def test_many_sessions_of_one_instant_are_paged_through(self, store: SessionStore) -> None:
        names = [f"t{number:03}" for number in range(230)]
        await asyncio.gather(*(store.register(session(name, created_at=5.0)) for name in names))
        first = await store.list_sessions(**(ALL | {"limit": 120}))
        rest = await store.list_sessions(**(ALL | {"limit": 120, "cursor": first.next_cursor}))
        assert [one.trial_id for one in [*first.items, *rest.items]] == names
        assert rest.next_cursor is None

    async def test_the_newest_first_are_paged_through_to_the_oldest(self, store: SessionStore) -> None:
        """Some hundred of one instant, some before and after it, and new ones that come meanwhile."""
        made = [(f"t{number:03}", 5.0 if 10 <= number < 230 else float(number)) for number in range(240)]
        await asyncio.gather(*(store.register(session(name, created_at=at)) for name, at in made))
        expected = [name for name, at in sorted(made, key=lambda one: (one[1], one[0]), reverse=True)]
        for bounds in ({}, {"since": 3.0}, {"until": 236.0}):
            seen: list[str] = []
            cursor, pages = None, 0
            while pages == 0 or cursor is not None:
                found = await store.list_sessions(
                    **(ALL | bounds | {"cursor": cursor, "limit": 90, "newest_first": True})
                )
                seen += [one.trial_id for one in found.items]
                cursor, pages = found.next_cursor, pages + 1
                await store.register(
                    session(f"late{bounds}{pages}".translate({ord(c): "-" for c in "{}': "}), created_at=999.0)
                )
            times = dict(made)
            seen = [name for name in seen if name in times]
            assert seen == [
                name for name in expected if bounds.get("since", 0.0) <= times[name] < bounds.get("until", 1000.0)
            ], bounds
            assert pages == 3

    @pytest.mark.parametrize("cursor", ["", "!", "AAAA", "zzzzzzzzzz", "é", "kqFhoWI"])
    async def test_a_bad_cursor_is_a_bad_request(self, store: SessionStore, cursor: str) -> None:
        with pytest.raises(BadRequest) as refused:
            await store.list_sessions(**(ALL | {"cursor": cursor}))
        assert refused.value.message.startswith(f"cursor: got {cursor!r}, must be ")
