"""Names that workers have served, while workers come and go."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from steno.contracts.wire.frames import ModelCard
from steno_proxy.policies.model_names import MOST_NAMES, ServedModelNames, policies_of
from steno_proxy.store.policies import MemoryPolicies


async def test_workers_may_come_and_go_while_the_store_is_asked() -> None:
    store = MemoryPolicies()
    names, served = ServedModelNames(store), {"model-a": "default"}
    await names.sync(served)
    asked, answer = asyncio.Event(), asyncio.Event()
    read = store.names

    async def slow() -> Any:
        asked.set()
        await answer.wait()
        return await read()

    cast(Any, store).names = slow
    syncing = asyncio.create_task(names.sync(dict(served)))
    await asked.wait()
    served["model-b"] = "frozen"
    assert names.hear(served)
    answer.set()
    assert await syncing
    assert names.all() == {"model-a": "default", "model-b": "frozen"}, "what was heard meanwhile is not forgotten"


async def test_a_name_that_is_retired_while_the_store_is_asked_is_not_back_with_its_answer() -> None:
    """Requests for other models waited for its workers, until the store was asked again."""
    store = MemoryPolicies()
    names = ServedModelNames(store)
    await names.sync({"actor": "default"})
    asked, answer = asyncio.Event(), asyncio.Event()
    read = store.names

    async def slow() -> Any:
        found = await read()
        asked.set()
        await answer.wait()
        return found

    cast(Any, store).names = slow
    syncing = asyncio.create_task(names.sync({}))
    await asked.wait()
    await names.retire("actor", [])
    answer.set()
    assert await syncing is True and names.all() == {} and not names.has_default()


async def test_the_default_policy_may_be_away_for_as_long_as_a_name_of_it_is_kept() -> None:
    store = MemoryPolicies()
    names = ServedModelNames(store)
    assert names.has_default(), "until they have been read, one may be of it"
    await names.sync({"judge": "frozen"})
    assert not names.has_default()
    assert names.hear({"judge": "frozen", "actor": "default"}) and names.has_default(), "at once"
    assert await store.names() == {"judge": "frozen"}
    await names.sync({"judge": "frozen", "actor": "default"})
    other = ServedModelNames(store)
    await other.sync({})
    assert other.has_default(), "its workers are away, and were never here"
    await other.retire("actor", [])
    assert not other.has_default()
    assert await names.sync({}) and not names.has_default()


async def test_a_name_that_is_served_under_another_policy_is_of_that_one_for_all() -> None:
    store = MemoryPolicies()
    one, two = ServedModelNames(store), ServedModelNames(store)
    await one.sync({"actor": "default"})
    await two.sync({})
    assert one.hear({"actor": "second"}) and not one.hear({"actor": "second"})
    assert await two.sync({"actor": "second"}) and not two.has_default()
    assert not await one.sync({"actor": "second"}), "it knows"
    assert await store.names() == one.all() == {"actor": "second"}


async def test_a_name_that_an_older_release_has_kept_gets_its_policy_once_it_is_served() -> None:
    store = MemoryPolicies()
    await store.keep_names({"actor": ""})
    names = ServedModelNames(store)
    await names.sync({})
    assert "actor" in names and not names.has_default()
    assert await names.sync({"actor": "default"}) and names.has_default()
    assert await store.names() == {"actor": "default"}


async def test_a_full_store_takes_no_new_names_and_still_learns_of_policies() -> None:
    store = MemoryPolicies()
    await store.keep_names({f"model-{number}": "frozen" for number in range(MOST_NAMES)})
    names = ServedModelNames(store)
    await names.sync({"model-7": "default", "one-more": "default"})
    assert (len(names.all()), names.all()["model-7"], "one-more" in names) == (MOST_NAMES, "default", False)
    assert await store.names() == names.all()


async def test_that_there_are_too_many_names_is_said_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryPolicies()
    await store.keep_names({f"model-{number}": "frozen" for number in range(MOST_NAMES)})
    names, served = ServedModelNames(store), {"one-more": "default", "another": "default"}
    for _ in range(5):
        await names.sync(served)
        names.hear(served)
    said = "1024 model names are kept, the maximum"
    assert caplog.text.count(said) == 1
    await names.retire("model-0", [])
    await names.retire("model-1", [])
    await names.sync(served)
    assert set(served) < set(names.all())
    for _ in range(5):
        await names.sync(served | {"yet-another": "default"})
    assert caplog.text.count(said) == 2, "another time is another line"


def test_a_name_under_several_policies_is_of_the_default_one_if_that_is_among_them() -> None:
    default, other = ModelCard("m", 9), ModelCard("m", 9, policy="second")
    judge = ModelCard("judge", 9, policy="frozen")
    for cards in ([default, other, judge], [judge, other, default]):
        assert policies_of(cards) == {"m": "default", "judge": "frozen"}
    assert policies_of([]) == {}
