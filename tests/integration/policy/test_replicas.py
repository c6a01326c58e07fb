"""Replicas of the proxy share what they were told of policies, and each brings the workers that it sees (I10)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.errors import Conflict
from steno.contracts.wire.frames import Prepare
from steno_proxy.store.redis.store import RedisStore
from tests.integration.policy.conftest import publish, running, shards_of
from tests.support.contracts.policy import spec
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.programs import processes, stack
from tests.support.waiting import until
from tests.support.weights import shards
from tests.support.workers import updating


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


async def test_an_update_posted_at_one_replica_reaches_and_gates_the_workers_of_another(redis: RedisServer) -> None:
    async with running(RedisStore(redis.url, **PATIENT)) as a, running(RedisStore(redis.url, **PATIENT)) as b:
        await a.worker("at-a")
        slow = await b.worker("at-b", auto=False)
        update = await a.steno.post_update(spec(1))
        await until(lambda: slow.count(Prepare) == 1)
        assert (await a.ended(update.update_id)).state == "done", "each replica sees to the workers that it has"
        await until(lambda: b.eligible() == [])
        assert (await b.steno.policies())[0].version == "run-a/1"
        with pytest.raises(Conflict):
            await b.steno.post_update(spec(1, weights=9))
        assert (await b.steno.post_update(spec(1))).update_id == update.update_id
        late = await b.worker("late", auto=False)
        assert b.eligible() == []
        await until(lambda: late.count(Prepare) == 1)
        for peer in (slow, late):
            await peer.stage(update.update_id)
            await until(lambda peer=peer: peer.count(type(peer.frames[0])) and len(peer.frames) == 2)  # type: ignore[misc]
            await peer.load(update.update_id)
        await until(lambda: b.eligible() == ["at-b", "late"])
        assert (await b.ended(update.update_id)).state == "done"


async def test_a_version_that_a_worker_announces_first_at_this_replica_is_not_taken_for_an_old_one(
    redis: RedisServer,
) -> None:
    async with running(RedisStore(redis.url, **PATIENT)) as a, running(RedisStore(redis.url, **PATIENT)) as b:
        here = await b.worker("here")
        await a.worker("there")
        first = await a.steno.post_update(spec(1))
        await until(lambda: here.version == "run-a/1")
        await a.ended(first.update_id)
        await until(lambda: b.eligible() == ["here"])
        store = a.app.state.services.store.policies
        asked = spec(2)
        await store.post(asked, now=time.time())  # at a third replica, a moment ago
        here.specs[asked.update_id] = asked
        await here.load(asked.update_id)
        for _ in range(50):
            assert b.eligible() == ["here"]
            await asyncio.sleep(0.005)
        await until(lambda: asked.update_id in b.policies._updates_of("default").runs)
        await until(lambda: b.policies._updates_of("default").in_force.version == "run-a/2")
        assert b.eligible() == ["here"]


async def test_a_proxy_that_starts_again_knows_what_is_in_force(redis: RedisServer) -> None:
    async with running(RedisStore(redis.url, **PATIENT)) as before:
        await before.worker("one")
        update = await before.ended((await before.steno.post_update(spec(1))).update_id)
        await until(lambda: before.policies._served.get("default") == update.update_id)
        run = before.policies._updates_of("default").runs[update.update_id]
        await until(lambda: run.stored == "done")
    async with running(RedisStore(redis.url, **PATIENT)) as after:
        await until(lambda: after.policies._updates_of("default").in_force is not None)
        assert (await after.steno.update(update.update_id)).state == "done"
        old = await after.worker("old", auto=False)
        assert after.eligible() == []
        await until(lambda: old.count(Prepare) == 1)
        assert [policy.version for policy in await after.steno.policies()] == ["run-a/1"]


async def test_the_store_is_away_for_a_while(redis: RedisServer) -> None:
    """Nobody waits for it but who posts; what was decided meanwhile is written when it is back."""
    async with running(RedisStore(redis.url, **PATIENT)) as fleet:
        peer = await fleet.worker("one", auto=False)
        update = await fleet.steno.post_update(spec(1))
        await until(lambda: peer.count(Prepare) == 1)
        redis.kill()
        await peer.stage(update.update_id)
        await until(lambda: len(peer.frames) == 2)
        await peer.load(update.update_id)
        assert (await fleet.ended(update.update_id)).state == "done"
        assert fleet.eligible() == ["one"]
        redis.start()
        run = fleet.policies._updates_of("default").runs[update.update_id]
        await until(lambda: run.stored == "done")
        assert (await fleet.app.state.services.store.policies.heads())[0].served == update.update_id


def test_a_replica_killed_in_a_stream_is_gone_on_from_at_another(redis: RedisServer, tmp_path: Path) -> None:
    """kill -9 between two uploads: the other replica has the update from the store, and the worker says how far it is."""
    (tmp_path / "script.py").write_text('def say(request):\n    return {"content": "one two three"}\n')
    worker = [
        "--engine",
        "scripted",
        "--script",
        f"{tmp_path}/script.py:say",
        "--model",
        str(stack.ROOT / "steno/models/tiny"),
    ]
    contents = {f"{i}.safetensors": {f"w{i}": shards.tensor([700_000], i)} for i in range(2)}
    manifest = shards.write(tmp_path / "copy", contents)
    asked = shards.spec(manifest, 1, probe=None)
    proxy = ("--redis-url", redis.url)
    with contextlib.ExitStack() as open_:
        a = open_.enter_context(stack.running(tmp_path / "a", None, proxy=proxy))
        b = open_.enter_context(stack.running(tmp_path / "b", None, proxy=proxy))
        both = ["--proxy", f"ws://127.0.0.1:{b.port}"]
        a.start_worker(*both, *worker)
        a.wait_for_model()
        b.wait_for_model()
        with Client(a.url) as first, Client(b.url) as second:
            update = first.post_update(asked)
            processes.until(lambda: first.update(update.update_id).wants)
            updating.upload(first, first.update(update.update_id), tmp_path / "copy", 1_000_000)
            a.proxy.kill()
            a.proxy.wait()
            done = updating.publish(second, asked, tmp_path / "copy")
            assert (done.update_id, done.state, [w.state for w in done.workers]) == (
                update.update_id,
                "done",
                ["served"],
            )
            assert [policy.version for policy in second.policies()] == ["run/1"]


async def test_uploads_go_on_at_a_replica_that_was_not_told(redis: RedisServer) -> None:
    async with running(RedisStore(redis.url, **PATIENT)) as a, running(RedisStore(redis.url, **PATIENT)) as b:
        peer = await b.worker("at-b", credit=50_000)
        asked = spec(1, transport="stream", location="", size=200_000)
        await a.steno.post_update(asked)
        assert (await publish(b, asked)).state == "done"
        assert {name: bytes(data) for name, data in peer.staged[asked.update_id].items()} == shards_of(asked)
