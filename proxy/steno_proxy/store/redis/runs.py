"""Runs and leases in Redis: keeps the `RunStore` protocol. What happens is `lua/run.lua`; the keys are in keys.py.

All keys of a run share one slot, so that each operation on it is one script. What must reach it from a trial's slot is sent
until it has arrived (`RedisStore.settle`) and counts once.

Those who wait for a group share one connection per process: a group that got ready is announced on one stream, whatever its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from steno.contracts.errors import Conflict, NotFound, StoreUnavailable
from steno.contracts.leases import (
    ALIVE_S,
    EvalGroups,
    GroupPlace,
    Lease,
    LeaseName,
    LeaseRequest,
    RunGroups,
    RunView,
    Tenure,
    newest_groups,
    run_trainer,
)
from steno.contracts.lenient import read_json
from steno.contracts.records import Group, Session
from steno_proxy.store.redis.link import RedisLink, Script
from steno_proxy.store.redis.schema import GROUPS_READY, PAST_RUNS, RUNS, request_key, run_id_of, run_keys, run_tag
from steno_proxy.store.run_interface import Granted, InHand, Waiters, alive, new_grant, superseded
from steno_proxy.store.run_state import REQUEST_TTL_S
from steno_proxy.store.settlement import TRAIN, Ended, Tokens

log = logging.getLogger(__name__)

READY_ENTRIES = 1000
"""Of the stream of announcements: as many groups as may get ready while a replica reads the last ones."""
DUE_AT_ONCE = 256
SUPERSEDED = -5
"""Outcome of run.lua: asked under an epoch that is not the run's any more; the run's follows."""
RETRY_S = 1.0
"""Before the stream is read again after Redis failed."""

READS = frozenset({"view", "in_hand", "epoch"})
"""Operations of run.lua that write nothing."""

Sessions = Callable[[Sequence[tuple[str, str]]], Awaitable[list[Session]]]
"""Those that are there of some trial ids and lives."""


class RedisRuns:
    """Args: link: for the scripts. watch_link: for the one call that blocks, for `block_ms`."""

    def __init__(self, link: RedisLink, watch_link: RedisLink, sessions: Sessions, block_ms: int) -> None:
        self._link = link
        self._watch_link = watch_link
        self._sessions = sessions
        self._block_ms = block_ms
        self._script, self._rest = Script("run"), Script("rest")
        self._waiters = Waiters()
        self._listener: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            self._listener = None

    async def _run(self, operation: str, run_id: str | None, now: float | None, *args: Any, request: str = "") -> Any:
        keys = [*run_keys(run_id), *([request_key(run_id, request)] if request else ())]
        at = "" if now is None else repr(now)
        return await self._link.run(self._script, keys, [operation, at, *args], writes=operation not in READS)

    # -- for the store: what becomes of groups and trials

    async def open_group(self, group: Group) -> None:
        due = "" if group.deadline_s is None else repr(group.created_at + group.deadline_s)
        args = [group.group_id, group.model_dump_json(), group.purpose, len(group.trial_ids), due]
        await self._run("open", group.run_id, group.created_at, *args)
        await self._link.write("ZADD", RUNS, "GT", repr(group.created_at), run_tag(group.run_id))

    async def ended(self, run_id: str | None, trial: Ended, now: float) -> None:
        args = [
            trial.group_id or "",
            trial.trial_id,
            trial.life,
            str(trial.outcome),
            int(trial.final),
            int(trial.booked),
        ]
        await self._woke(run_id, await self._run("ended", run_id, now, *args, *_flat(trial.tokens)))

    async def settled(self, run_id: str | None, trial: Ended, now: float) -> None:
        """The trial's slot says from now on that its tokens are booked."""
        await self._run("settled", run_id, now, f"{trial.trial_id}/{trial.life}")

    async def came_late(
        self, run_id: str | None, trial_id: str, turn_id: str, tokens: Tokens, reason: str, now: float
    ) -> None:
        await self._run("late", run_id, now, f"{trial_id}/turn/{turn_id}", str(reason), *_flat(tokens))

    async def lets_go(self, run_id: str | None, group_id: str, now: float) -> bool:
        gone, woke = await self._run("lets_go", run_id, now, group_id)
        await self._woke(run_id, woke)
        return bool(gone)

    async def forget(self, group: Group, now: float, *, archived: bool = False) -> None:
        """None of its trials is here any more. archived: they are in the archive, and lists name it."""
        await self._woke(group.run_id, await self._run("forget", group.run_id, now, group.group_id, int(archived)))

    # -- RunStore

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> Granted:
        remembered = request.request_id or ""
        args = [request.consumer, request.max_groups, at_least, repr(request.ttl_s), new_grant(epoch)]
        args.append(round(REQUEST_TTL_S) if remembered else 0)
        reply = await self._run("lease", request.run_id, now, *args, request=remembered)
        if reply[0] == SUPERSEDED:
            raise superseded(request.run_id, int(reply[1]))
        await self._woke(request.run_id, reply[0])
        leases, waited_s, at = [], [], float(reply[2])
        for item in reply[3:]:
            leases.append(await self._lease(request.run_id, item))
            waited_s.append(max(0.0, at - float(item[4])))
        return Granted(leases, waited_s, float(reply[1]) - at if reply[1] else None)

    async def _lease(self, run_id: str | None, item: list[bytes]) -> Lease:
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

    async def _finish(
        self, what: str, name: LeaseName, now: float | None, ttl_s: float = 0.0, used: bool = False
    ) -> list[bytes]:
        """When the group was granted ("": what was asked for was done before), now, and when the lease ends."""
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
        since, at, _ = await self._finish("acknowledge", LeaseName.decode(lease_id), now)
        return max(0.0, float(at) - float(since)) if since else None

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        name = LeaseName.decode(lease_id)
        since, *_ = await self._finish("release", name, now)
        await self._woke(name.run_id, 1 if since else 0)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        *_, expires_at = await self._finish("extend", LeaseName.decode(lease_id), now, ttl_s, used)
        return float(expires_at)

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        epoch, name, left, woke = await self._run("take_over", run_id, now, trainer, int(force), repr(ALIVE_S))
        if not epoch:
            raise alive(run_id, name.decode(), float(left))
        await self._woke(run_id, woke)
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        outcome, newest = await self._run("heartbeat", run_id, now, trainer, epoch, int(leaving))
        if outcome == SUPERSEDED:
            raise superseded(run_id, newest)

    async def check_epoch(self, run_id: str | None, epoch: int) -> None:
        if (newest := await self._run("epoch", run_id, None)) > epoch:
            raise superseded(run_id, newest)

    async def view(self, run_id: str | None, *, now: float | None = None) -> RunView:
        totals, ledger, ready, leased, used, trainer, epoch, heard, at = await self._run("view", run_id, now)
        counts = {key.decode(): int(value) for key, value in _pairs(totals)}
        view = RunView(
            run_id=run_id,
            groups=RunGroups(
                running=counts.get("train:running", 0),
                ready=ready,
                leased=leased - used,
                used=used,
                acknowledged=counts.get("train:acknowledged", 0),
                empty=counts.get("train:empty", 0),
            ),
            eval_groups=EvalGroups(running=counts.get("eval:running", 0), ended=counts.get("eval:ended", 0)),
            trainer=run_trainer(trainer.decode(), epoch, float(heard), float(at)),
            rollouts_over=bool(counts.get("rollouts:over", 0)),
        )
        for key, tokens in _pairs(ledger):
            side, _, rest = key.decode().partition(":")
            if side == "s":
                view.sampled[rest] = int(tokens)
            else:
                reason, _, version = rest.partition(":")
                view.not_trained.setdefault(reason, {})[version] = int(tokens)
        return view

    async def groups(self, run_id: str | None, *, now: float | None = None) -> list[GroupPlace]:
        keys = run_keys(run_id)
        here, past = await self._link.ask(("HGETALL", keys.groups), ("HGETALL", keys.past))
        at = time.time() if now is None else now
        past = {name: raw for name, raw in past.items() if name not in here}
        places = [_place(name.decode(), msgspec.json.decode(raw), at) for name, raw in here.items()]
        places += [_place(name.decode(), msgspec.json.decode(raw), at, archived=True) for name, raw in past.items()]
        return newest_groups(places)

    async def newest(self, limit: int) -> list[tuple[str | None, float]]:
        found: dict[bytes, float] = {}
        for key in (PAST_RUNS, RUNS):  # a run may be in both: it has groups again
            found |= await self._link.call(self._link.client.zrange(key, 0, limit - 1, desc=True, withscores=True))
        newest = sorted(found.items(), key=lambda run: run[1], reverse=True)
        return [(run_id_of(tag.decode()), made_at) for tag, made_at in newest[:limit]]

    async def rollouts(self, run_id: str | None, over: bool) -> None:
        await self._run("rollouts", run_id, None, int(over))

    async def _known(self) -> list[tuple[bytes, bytes]]:
        """Tags of runs that have groups, or had a while ago, and their scores."""
        found = await self._link.ask(("ZRANGE", RUNS, 0, -1, "WITHSCORES"))
        return list(_pairs(found[0]))

    async def close_due(self, *, now: float | None = None) -> None:
        known = [(run_id_of(tag.decode()), tag, score) for tag, score in await self._known()]
        ready = await asyncio.gather(*(self._run("due", run_id, now, DUE_AT_ONCE) for run_id, *_ in known))
        for (run_id, tag, score), (woke, groups) in zip(known, ready, strict=True):
            await self._woke(run_id, woke)
            if not groups:
                await self._link.run(self._rest, [RUNS, PAST_RUNS], [tag, score])

    async def in_hand(self, *, now: float | None = None) -> InHand:
        known = [run_id_of(tag.decode()) for tag, _ in await self._known()]
        counts = await asyncio.gather(*(self._run("in_hand", run_id, now) for run_id in known))
        return InHand(*(sum(column) for column in zip([0, 0, 0], *counts, strict=True)))

    # -- waiting

    @contextlib.contextmanager
    def watch(self, run_id: str | None) -> Iterator[asyncio.Event]:
        with self._waiters.watch(run_id) as event:
            if self._listener is None or self._listener.done():
                self._listener = asyncio.create_task(self._listen())
            yield event

    async def _woke(self, run_id: str | None, ready: int) -> None:
        """Groups got ready. A failure to say so costs those who wait elsewhere some seconds, and the caller nothing."""
        if not ready:
            return
        self._waiters.wake(run_id)
        try:
            await self._link.call(
                self._link.client.xadd(GROUPS_READY, {"run": run_tag(run_id)}, maxlen=READY_ENTRIES, approximate=True)
            )
        except StoreUnavailable:
            log.warning("can't announce a group that is ready; waiting trainers will find it when they poll")

    async def _listen(self) -> None:
        """Wake who waits here, for as long as anybody does."""
        last: bytes | str = "$"
        while len(self._waiters):
            try:
                reply = await self._watch_link.call(
                    self._watch_link.client.xread({GROUPS_READY: last}, block=self._block_ms)
                )
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            for entry, fields in reply[0][1] if reply else ():
                last = entry
                self._waiters.wake(run_id_of(fields[b"run"].decode()))


def _place(name: str, kept: dict[str, Any], now: float, *, archived: bool = False) -> GroupPlace:
    """What run.lua keeps of a group (its letters are told there)."""
    state = "ready" if kept["s"] == "leased" and float(kept["x"]) <= now else kept["s"]
    made_at = float(kept["m"]) if "m" in kept else None
    return GroupPlace(
        group_id=name, purpose=kept["p"], state=state, size=kept["n"], ended=kept["f"], grants=kept["g"],
        trainer=kept.get("c") if state == "leased" else None, created_at=made_at, archived=archived,
    )  # fmt: skip


def _flat(tokens: Tokens) -> list[Any]:
    return [part for pair in tokens.items() for part in pair]


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
