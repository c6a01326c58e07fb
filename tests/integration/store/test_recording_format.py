"""docs/recording-format.md says what is stored: its program reads a real recording, its tables name every key and field."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

from steno.contracts.records import IndexRow, bytes_to_ids
from steno_proxy.store.encoding.codec import TurnMeta
from steno_proxy.store.encoding.head import Head
from steno_proxy.store.redis import schema
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.list import make_group
from tests.support.contracts.recording import END, record
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.groups import finished, lease

PAGE = Path(__file__).parents[3] / "docs" / "recording-format.md"


async def test_the_program_on_the_page_reads_a_recording(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, **PATIENT)
    made = await record(store, "by-hand", 3)
    await store.close()
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    command = [sys.executable, "-I", "-c", program, redis_server.url, "by-hand"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0
    for one in made:
        assert f"{one.index} {one.turn_id} parent {one.index - 1} {one.model}" in output
        assert f"completion ids {bytes_to_ids(one.completion_ids).tolist()}" in output


def test_the_page_names_every_key_and_field() -> None:
    page = PAGE.read_text()
    names = [f"`steno:{{T}}:{name}`" for name in schema.TrialKeys._fields]
    for struct in (Head, IndexRow, TurnMeta):
        names += [f"`{name}`" for name in struct.__struct_fields__]
    names += [f"`steno:{{R}}:{name}`" for name in schema.RunKeys._fields]
    assert [name for name in names if name not in page] == []


async def test_redis_holds_no_other_keys(server: RedisServer, store: RedisStore) -> None:
    group, sessions = make_group("g1", 3)
    await store.create_group(group, sessions)
    await record(store, "alone", 2)
    for trial_id in ("alone", "g1-1"):
        assert not await store.asked_again(trial_id, b"k" * 16, began=1.0, count=1, n=1, now=1.0)
    await store.complete("g1-0", status="aborted", **END)
    await store.delete("g1-1", now=1.0, tombstone_s=60.0)
    await finished(store, "g2", run_id="r", deadline_s=1.0)
    await lease(store, run_id="r", request_id="N")
    await finished(store, "g3", run_id=None)
    await anext(store.events("alone"))
    await store.token_texts.keep("0" * 16, b"texts")
    page = PAGE.read_text()
    with server.client() as redis:
        found = {(key.decode(), redis.type(key).decode()) for key in redis.scan_iter("*")}
    assert [key for key, _ in found if key.endswith(":again")] == ["steno:{alone}:again"], "a deleted one leaves none"
    for key, kind in found:
        name = re.sub(r"\{:run[^}]*\}", "{R}", re.sub(r"\{[^:}]+\}", "{T}", key)).replace("group:{T}", "group:{G}")
        name = re.sub(r"group:g\d$", "group:G", name)
        short = name if "completed" not in name and "aborted" not in name else "…:" + name.rpartition(":")[2]
        line = next((line for line in page.splitlines() if line.startswith("|") and f"`{short}`" in line), "")
        assert f"| {kind} |" in line, f"{key}, a {kind}, is not on the page"


async def test_what_a_later_replica_added_to_a_group_is_left_out(server: RedisServer, store: RedisStore) -> None:
    """A rolling upgrade: older replicas read the groups that newer ones have made, and list and lease them."""
    group, sessions = make_group("g1", 1)
    await store.create_group(group, sessions)
    with server.client() as redis:
        [key] = redis.scan_iter("steno:group:*g1*")
        redis.set(key, json.dumps(group.model_dump(mode="json") | {"later": 1, "limits": {"max_later": 2}}))
    assert await store.group("g1") == group
    assert await store.create_group(group, sessions) == group
