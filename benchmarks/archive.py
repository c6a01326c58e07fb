"""A month of ended sessions, and what they cost: Redis's memory, the archive's bytes, lists, and a sweep of what is open.

    python -m benchmarks.archive [--sessions 150000] [--sample 600] [--open 40000]

Sessions of six turns (2 KB of new text each) are recorded, ended and archived as the proxy does it: the sample, from which bytes
and seconds are scaled. The month's index entries (what stays in Redis of an archived session) are all there, made directly, and
point at objects of the sample. Needs redis-server on the PATH; a server and a folder of its own, both gone at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from steno.contracts.records import Group, Limits, Session
from steno_proxy.archive import objects as objects_module
from steno_proxy.archive.archiver import Archiver
from steno_proxy.archive.objects import ObjectStorage
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.redis.schema import ALL, ARCHIVED, group_index_key, group_key, status_key
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.recording import END
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.records.recordings import conversation, session

GROUP = 8
TURNS = 6
DAY_S = 86400.0


async def sample(store: RedisStore, count: int) -> None:
    """Sessions as a training run leaves them, of evaluation groups: no trainer is waited for."""
    made = conversation(TURNS)
    for number in range(count // GROUP):
        names = [f"run-2026-11.{number}.{i}" for i in range(GROUP)]
        group = Group(
            group_id=f"run-2026-11.{number}",
            run_id="run-2026-11",
            size=GROUP,
            trial_ids=names,
            created_at=1.0,
            purpose="eval",
        )
        await store.create_group(group, [session(t, group_id=group.group_id, run_id=group.run_id) for t in names])
        for name in names:
            for n, (turn, row) in enumerate(made):
                await store.commit(name, turn, row, now=10.0 + n)
            await store.complete(name, status="completed", **END)
            await store.settle(name, now=END["now"])


def month(client: redis.Redis, count: int, sampled: int) -> None:
    """The rest of the month: all that Redis keeps of archived sessions, and of their groups."""
    places = list(client.hgetall(ARCHIVED).values())
    document = client.get(group_key("run-2026-11.0")) or b""
    pipe = client.pipeline(transaction=False)
    for number in range(sampled // GROUP, count // GROUP):
        group = f"run-2026-11.{number}"
        for i in range(GROUP):
            trial, created = f"{group}.{i}", 1_700_000_000.0 + number * 14.0
            pipe.zadd(ALL, {trial: created})
            pipe.zadd(status_key("completed"), {trial: created})
            pipe.zadd(group_index_key(group), {trial: created})
            pipe.hset(ARCHIVED, trial, places[(number * GROUP + i) % len(places)])
        pipe.set(group_key(group), document)
        if number % 500 == 0:
            pipe.execute()
    pipe.execute()


async def page_ms(store: SessionStore, since: float | None) -> float:
    began = time.perf_counter()
    page = await store.list_sessions(status=None, group_id=None, since=since, until=None, cursor=None, limit=100)
    assert page.items or page.unreadable
    return (time.perf_counter() - began) * 1000


async def sweep_cpu_s(store: RedisStore, client: redis.Redis, count: int) -> dict[str, float]:
    """CPU of this process and of Redis for one look at many open sessions: the first, and those after it."""
    now = time.time()
    for at in range(0, count, 200):
        limits = Limits(max_idle_s=3600.0)
        made = (session(f"open{n}", created_at=now, limits=limits) for n in range(at, min(count, at + 200)))
        await asyncio.gather(*(store.register(one) for one in made))
    recorder = Recorder(store, cache_bytes=0, implicit=False)

    def redis_s() -> float:
        found = client.info("cpu")
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])

    spent = {}
    for name in ("first", "second"):
        began, began_redis = time.process_time(), redis_s()
        await recorder.end_timed_out()
        spent[name] = round(time.process_time() - began, 4)
        spent[f"{name}_redis"] = round(redis_s() - began_redis, 4)
    began = time.process_time()
    cursor = None
    while True:  # what each sweep did before there was an index of times
        page = await store.list_sessions(status="open", group_id=None, since=None, until=None, cursor=cursor, limit=200)
        if (cursor := page.next_cursor) is None:
            break
    spent["all_read"] = round(time.process_time() - began, 4)
    return spent


def _any_will_do(trial_id: str, archived: Session) -> None:
    """The month's entries point at sessions of the sample."""


async def measure(sessions: int, sampled: int, still_open: int) -> dict[str, Any]:
    server = RedisServer()
    try:
        with tempfile.TemporaryDirectory(prefix="steno-archive-") as folder, server.client() as client:
            objects = ObjectStorage(folder)
            objects_module._check = _any_will_do
            store = RedisStore(server.url, shelf=objects, **PATIENT)
            used = lambda: int(client.info("memory")["used_memory"])  # noqa: E731
            empty = used()
            await sample(store, sampled)
            live = used() - empty
            began, cpu = time.perf_counter(), time.process_time()
            moved = await Archiver(store, objects).round(now=END["now"] + DAY_S, retention_s=DAY_S)
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert moved == sampled, (moved, sampled)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.gz"))  # noqa: ASYNC240
            before = used()
            month(client, sessions, sampled)
            entry = (used() - before) / (sessions - sampled)
            pages = {
                "first_page_ms": await page_ms(store, None),
                "a_late_page_ms": await page_ms(store, 1_700_000_000.0 + sessions),
            }
            began = time.process_time()
            await store.expire(now=END["now"] + DAY_S, retention_s=DAY_S)
            await store.runs.close_due()
            await store.runs.in_hand()
            idle = time.process_time() - began
            spent = await sweep_cpu_s(store, client, still_open)
            await store.close()
            return {
                "sessions": sessions,
                "sampled": sampled,
                "redis_bytes_per_session_before": round(live / sampled),
                "redis_bytes_per_archived_session": round(entry),
                "redis_mb_of_the_month": round(entry * sessions / 1e6, 1),
                "archive_bytes_per_session": round(size / sampled),
                "archive_mb_of_the_month": round(size / sampled * sessions / 1e6),
                "archiving_ms_per_session": round(took / sampled * 1000, 2),
                "archiving_cpu_s_per_day_of_5000": round(cpu / sampled * 5000, 1),
                "sweep_cpu_s_with_the_month_archived": round(idle, 4),
                **{name: round(ms, 1) for name, ms in pages.items()},
                f"sweep_cpu_s_of_{still_open}_open": spent,
            }
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=150_000)
    parser.add_argument("--sample", type=int, default=600)
    parser.add_argument("--open", type=int, default=40_000)
    asked = parser.parse_args()
    print(json.dumps(asyncio.run(measure(asked.sessions, asked.sample, asked.open)), indent=2))


if __name__ == "__main__":
    main()
