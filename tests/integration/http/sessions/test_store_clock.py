"""All that a proxy records is stamped by the clock of its store, not of its machine: replicas stamp alike."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.contracts.policy import spec
from tests.support.workers.parrot import ParrotEngine, Say

BEHIND_S = 3600.0


class Behind(MemoryStore):
    """Its clock is an hour behind this machine's."""

    def clock(self) -> float:
        return time.time() - BEHIND_S


def times(record: Any) -> list[float]:
    """All numbers in a record that look like Unix seconds of these years."""
    if isinstance(record, dict):
        return [found for value in record.values() for found in times(value)]
    if isinstance(record, list):
        return [found for value in record for found in times(value)]
    return [record] if isinstance(record, float) and 1.7e9 < record < 4e9 else []


async def got(proxy: Proxy, path: str) -> Any:
    answer = await proxy.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_whatever_a_proxy_records_has_its_stores_time() -> None:
    async with running(ParrotEngine(lambda request: Say("abcd")), store=Behind()) as proxy:
        before = time.time() - BEHIND_S
        group = {"group_id": "g", "run_id": "r", "size": 2}
        limited = {"run_id": "r", "limits": {"max_turns": 1}}
        assert (await proxy.http.post("/sessions/limited", json=limited)).status_code == 200
        assert (await proxy.http.post("/groups", json=group)).status_code == 200
        assert (await proxy.http.post("/sessions/t", json={"run_id": "r"})).status_code == 200
        for trial_id in ("t", "g.0", "by-itself", "limited"):
            assert (await proxy.chat(trial_id, "hello")).status_code == 200
        assert (await proxy.chat("limited", "hello")).status_code == 403
        assert (await proxy.chat("t", "hello", max_tokens="many")).status_code == 400
        assert (await proxy.http.post("/sessions/t/complete", json={"reward": 1.0})).status_code == 200
        step = {"step": 1, "values": {}, "ledger": {}, "groups": []}
        assert (await proxy.http.post("/runs/r/steps", json=step)).status_code == 200

        async with asyncio.timeout(60):
            while (await got(proxy, "/sessions/t"))["notes"] is None:
                await asyncio.sleep(0.01)
        found = {
            path: times(await got(proxy, path))
            for path in (
                "/sessions/limited", "/sessions/t", "/sessions/t/turns",
                "/sessions/g.0", "/sessions/g.0/turns", "/sessions/by-itself", "/groups/g",
                "/runs/r/steps",
            )
        }  # fmt: skip
        after = time.time() - BEHIND_S
        # created, updated, first turn, end, and the note; queued, started, first and last token
        assert len(found["/sessions/t"]) == 5 and len(found["/sessions/t/turns"]) == 4, found
        for path, stamps in found.items():
            assert stamps and all(before - 0.001 <= stamp <= after + 0.001 for stamp in stamps), (path, before, stamps)


async def test_so_has_a_policy_update_whose_deadline_replicas_share() -> None:
    async with running(store=Behind()) as proxy:
        before = time.time() - BEHIND_S
        answer = await proxy.http.post("/policy/updates", json=spec().model_dump(mode="json"))
        assert answer.status_code == 202, answer.text
        [head] = await proxy.store.policies.heads()
        assert before <= head.since <= time.time() - BEHIND_S
