"""Over HTTP: what has left Redis is read as before, and a Redis that fills takes no new trials."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ObjectStorage
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import RedisServer

ADMIN = "the-admins-key"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
async def proxy(server: RedisServer, tmp_path: Path) -> AsyncIterator[Proxy]:
    with server.client() as client:
        client.flushall()
    async with running(redis_url=server.url, archive=str(tmp_path / "archive"), admin_key=ADMIN) as found:
        yield found


async def test_what_has_left_redis_is_read_as_before(proxy: Proxy, server: RedisServer, tmp_path: Path) -> None:
    """By hand: the proxy's own rounds leave what has just ended."""
    held = GroupSpec(group_id="held", size=1)
    await proxy.steno.create_group(held)
    await proxy.steno.create_group(GroupSpec(group_id="g", size=2, purpose="eval", run_id="r"))
    for trial_id in ("held.0", "g.0", "g.1"):
        assert (await proxy.chat(trial_id, "Hello")).status_code == 200
    paths = [f"/sessions/{trial_id}{what}" for trial_id in ("g.0", "g.1") for what in ("", "/turns", "/samples")]

    async def read() -> list[object]:
        return [json.loads((await proxy.http.get(path)).text) for path in paths]

    for trial_id in ("held.0", "g.0", "g.1"):
        await proxy.steno.complete(trial_id, Completion(reward=1.0))
    before = await read()
    with server.client() as client:
        assert client.exists("steno:{g.0}:session", "steno:{g.1}:session") == 2
        archiver = Archiver(proxy.store, ObjectStorage(str(tmp_path / "archive")))
        async with asyncio.timeout(60):  # while the proxy's own archives, nobody else does
            while client.exists("steno:{g.0}:session", "steno:{g.1}:session"):
                await archiver.round(now=time.time() + 1.0, retention_s=0.01)
        assert client.exists("steno:{held.0}:session"), "its group waits for a trainer"
    assert await read() == before
    listed = (await proxy.http.get("/sessions")).json()
    assert (sorted(one["trial_id"] for one in listed["items"]), listed["unreadable"]) == (["g.0", "g.1", "held.0"], [])
    assert (await proxy.http.get("/sessions/g.0/events")).text.count("event: ") == 2
    archived = [path for path in (tmp_path / "archive").rglob("*.gz") if path.is_file()]
    hidden = [path.rename(path.with_suffix(".away")) for path in archived]
    told = {}
    for key in (
        await proxy.steno.run_key("r"),
        (await proxy.steno.create_group(held)).harness_key or "",
        "sk-steno-x",
        "",
    ):
        for trial_id in ("g.0", "nobodys.0"):
            answer = await proxy.http.get(
                f"/sessions/{trial_id}", headers={"authorization": f"Bearer {key}" if key else "none"}
            )
            told[key[:3], trial_id] = answer.status_code, "archive" in answer.text
    assert told.pop(("rk-", "g.0")) == (503, True), "its run's key is told why"
    refused = {
        (key, name): (403 if key else 401, False) for key in ("rk-", "hk-", "sk-", "") for name in ("g.0", "nobodys.0")
    }
    assert told == {place: answer for place, answer in refused.items() if place != ("rk-", "g.0")}, (
        "no one else is, of anything"
    )
    for path, there in zip(hidden, archived, strict=True):
        path.rename(there)
    again = await proxy.steno.complete("g.0", Completion(reward=1.0))
    assert again.reward == 1.0
    assert (await proxy.chat("g.0", "Hello")).status_code == 410
    files = [path.read_bytes() for path in (tmp_path / "archive").rglob("*") if path.is_file()]
    assert len(files) >= 2
    assert not any(ADMIN.encode() in data for data in files)


async def test_a_redis_that_fills_takes_no_new_trials_and_those_that_run_go_on(
    proxy: Proxy, server: RedisServer
) -> None:
    await proxy.steno.register("old")
    await proxy.steno.create_group(GroupSpec(group_id="g", size=1))
    with server.client() as client:
        client.set("ballast", bytes(8 << 20))  # beside it, buffers of connections, which come and go, are nothing
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.85))
        try:
            capacity = proxy.app.state.services.capacity
            await capacity.look()
            assert capacity.tight
            for path, body in (("/sessions/new", None), ("/groups", {"group_id": "h", "size": 1})):
                answer = await proxy.http.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_full")
                assert "no new trials are taken" in answer.text and int(answer.headers["retry-after"]) > 0
            assert (await proxy.chat("old", "Hello")).status_code == 200
            assert (await proxy.steno.register("old", SessionSpec())).session.status == "open"
            await proxy.steno.create_group(GroupSpec(group_id="g", size=1))
            metric = (await proxy.http.get("/metrics")).text
            assert float(metric.partition("\nsteno_proxy_store_fullness_ratio ")[2].split()[0]) > 0.7
        finally:
            client.config_set("maxmemory", 0)
            client.delete("ballast")
