"""Runs and leases as older releases keep them in Redis (before ADR 21): one script for all, `tests/fixtures/older/run.lua`.

For tests of replicas of both releases on one Redis.
"""

from __future__ import annotations

from hashlib import sha1
from pathlib import Path
from typing import Any

import msgspec

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.lenient import read_json
from steno.contracts.records import Group
from steno.contracts.runs.leases import ALIVE_S, Lease, LeaseName, LeaseRequest, Tenure
from steno_proxy.store.redis.link.redis_link import Script
from steno_proxy.store.redis.runs import RedisRuns
from steno_proxy.store.redis.schema import RUNS, request_key, run_id_of, run_keys, run_tag
from steno_proxy.store.redis.store import RedisStore
from steno_proxy.store.runs.interface import GrantedLeases, alive, new_grant, superseded
from steno_proxy.store.runs.settlement import TRAIN, EndedTrial, Tokens

SOURCE = Path(__file__).parents[2] / "fixtures" / "older" / "run.lua"
SUPERSEDED = -5


class _Older(Script):
    def __init__(self) -> None:
        self.source = SOURCE.read_text()
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class OlderRuns(RedisRuns):
    """What only reads (`view`, `groups`) is this release's."""

    _script = _Older()

    async def _run(self, operation: str, run_id: str | None, now: float | None, *args: Any, request: str = "") -> Any:
        keys = [*run_keys(run_id), *([request_key(run_id, request)] if request else ())]
        return await self._link.run(self._script, keys, [operation, "" if now is None else repr(now), *args])

    async def open_group(self, group: Group) -> None:
        due = "" if group.deadline_s is None else repr(group.created_at + group.deadline_s)
        args = [group.group_id, group.model_dump_json(), group.purpose, len(group.trial_ids), due]
        await self._run("open", group.run_id, group.created_at, *args)
        await self._link.write("ZADD", RUNS, "GT", repr(group.created_at), run_tag(group.run_id))

    async def ended(self, run_id: str | None, trial: EndedTrial, now: float) -> None:
        args = [
            trial.group_id or "",
            trial.trial_id,
            trial.life,
            str(trial.outcome),
            int(trial.final),
            int(trial.booked),
        ]
        if await self._run("ended", run_id, now, *args, *_flat(trial.tokens)):
            await self._woke(run_id)

    async def settled(self, run_id: str | None, trial: EndedTrial, now: float) -> None:
        await self._run("settled", run_id, now, f"{trial.trial_id}/{trial.life}")

    async def came_late(
        self, run_id: str | None, trial_id: str, turn_id: str, tokens: Tokens, reason: str, now: float
    ) -> None:
        await self._run("late", run_id, now, f"{trial_id}/turn/{turn_id}", str(reason), *_flat(tokens))

    async def lets_go(self, run_id: str | None, group_id: str, now: float, *, serve: bool = True) -> bool:
        gone, woke = await self._run("lets_go", run_id, now, group_id)
        if woke:
            await self._woke(run_id)
        return bool(gone)

    async def forget(self, group: Group, now: float, *, archived: bool = False) -> None:
        if await self._run("forget", group.run_id, now, group.group_id, int(archived)):
            await self._woke(group.run_id)

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> GrantedLeases:
        remembered = request.request_id or ""
        args = [request.consumer, request.max_groups, at_least, repr(request.ttl_s), new_grant(epoch)]
        args.append(300 if remembered else 0)
        reply = await self._run("lease", request.run_id, now, *args, request=remembered)
        if reply[0] == SUPERSEDED:
            raise superseded(request.run_id, int(reply[1]))
        if reply[0]:
            await self._woke(request.run_id)
        at = float(reply[2])
        leases = [await self._leased(request.run_id, item) for item in reply[3:]]
        waited_s = [max(0.0, at - float(item[4])) for item in reply[3:]]
        return GrantedLeases(leases, waited_s, float(reply[1]) - at if reply[1] else None)

    async def _leased(self, run_id: str | None, item: list[bytes]) -> Lease:
        name, grant, grants, expires, _, doc, *rest = item
        kept = {
            trial.decode(): msgspec.json.decode(raw) if raw else None
            for trial, raw in zip(rest[::2], rest[1::2], strict=True)
        }
        brings = {trial: found for trial, found in kept.items() if found and found["o"] == TRAIN}
        return Lease(
            lease_id=LeaseName(run_id, name.decode(), grant.decode()).encode(),
            group=read_json(Group, doc),
            trials=await self._sessions([(trial, found["l"]) for trial, found in brings.items()]),
            left_out={trial: found["o"] if found else "late" for trial, found in kept.items() if trial not in brings},
            tokens={trial: found["k"] for trial, found in brings.items()},
            expires_at=float(expires),
            grants=int(grants),
        )

    async def _older_finish(
        self, what: str, name: LeaseName, now: float | None, ttl_s: float = 0.0, used: bool = False
    ) -> list[bytes]:
        args = [what, name.group_id, name.grant, repr(ttl_s), int(used)]
        outcome, *rest = await self._run("finish", name.run_id, now, *args)
        if outcome == SUPERSEDED:
            raise superseded(name.run_id, int(rest[0]))
        if outcome == -1:
            raise NotFound(f"no group {name.group_id} is leased")
        if outcome != 1:
            raise Conflict(f"group {name.group_id} is not held under this lease any more")
        found: list[bytes] = rest
        return found

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        since, at, _ = await self._older_finish("acknowledge", LeaseName.decode(lease_id), now)
        return max(0.0, float(at) - float(since)) if since else None

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        name = LeaseName.decode(lease_id)
        since, *_ = await self._older_finish("release", name, now)
        if since:
            await self._woke(name.run_id)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        *_, expires_at = await self._older_finish("extend", LeaseName.decode(lease_id), now, ttl_s, used)
        return float(expires_at)

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        epoch, name, left, woke = await self._run("take_over", run_id, now, trainer, int(force), repr(ALIVE_S))
        if not epoch:
            raise alive(run_id, name.decode(), float(left))
        if woke:
            await self._woke(run_id)
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        outcome, newest = await self._run("heartbeat", run_id, now, trainer, epoch, int(leaving))
        if outcome == SUPERSEDED:
            raise superseded(run_id, newest)

    async def set_rollouts_over(self, run_id: str | None, over: bool) -> None:
        await self._run("rollouts", run_id, None, int(over))

    async def close_due(self, *, now: float | None = None) -> None:
        for tag, _ in await self._known():
            await self._run("due", run_id_of(tag.decode()), now, 256)


def older(store: RedisStore) -> RedisStore:
    """Makes this replica one of the older release, as far as runs go."""
    runs = store.runs
    store.runs = OlderRuns(runs._link, runs._watch_link, runs._sessions, runs._block_ms, runs._clock)
    store._accounts._runs = store.runs
    return store


def _flat(tokens: Tokens) -> list[Any]:
    return [part for pair in tokens.items() for part in pair]
