"""Runs and leases in Redis: keeps the `RunStore` protocol over the decisions of `store/runs/`. The keys are in schema.py.

All keys of a run share one slot. A change reads the parts of the run that it needs (`run_read.lua`), decides, and writes if they
are still the same (`run_write.lua`); see `run/changes.py`.
What must reach a run from a trial's slot is sent until it has arrived (`RedisStore.settle`) and counts once.

Those who wait for a group share one connection per process: a group that got ready is announced on one stream, whatever its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from steno.contracts.errors import StoreUnavailable
from steno.contracts.lenient import read_json
from steno.contracts.records import Group, Session
from steno.contracts.runs.leases import GroupPlace, LeaseName, LeaseRequest, NotTrained, RunView, Tenure, newest_groups
from steno.contracts.runs.training_steps import MOST_STEPS, TrainingStep
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.run.changes import RunChanges
from steno_proxy.store.redis.run.parts import STATE, WHOLE, RedisRun, RunQuery, read
from steno_proxy.store.redis.schema import GROUPS_READY, PAST_RUNS, RUNS, run_id_of, run_keys, run_tag, steps_key
from steno_proxy.store.runs import decisions as decide
from steno_proxy.store.runs import leasing, overview
from steno_proxy.store.runs.account import GroupStatus, RegisteredTrainer, RunAccount
from steno_proxy.store.runs.interface import GrantedLeases, GroupsInHand, LeaseWaiters, new_grant, superseded
from steno_proxy.store.runs.settlement import EndedTrial, Tokens

log = logging.getLogger(__name__)

READY_ENTRIES = 1000
"""Of the stream of announcements: as many groups as may get ready while a replica reads the last ones."""
DUE_AT_ONCE = 256
MOST_ARCHIVED = 100_000
"""Groups of a run that lists name after their trials have left for the archive: the newest, some 15 MB."""
ARCHIVED_MORE = 1000
"""The oldest are removed only when there are so many more than MOST_ARCHIVED: finding them reads all of them."""
SCANNED = 1000
LISTED_AT_ONCE = 500
"""Groups that are decoded between two turns of the event loop, in 5 ms."""
STEPS_AT_ONCE = 100
"""Steps that are decoded between two turns of the event loop, in 3 ms."""
RETRY_S = 1.0
"""How long the listener waits before it reads the stream again after Redis failed."""

Sessions = Callable[[Sequence[tuple[str, str]]], Awaitable[list[Session]]]
"""Reads the sessions of some (trial id, life) pairs, without those that are gone."""


class RedisRuns:
    """Keeps the `RunStore` protocol. Any number of replicas may use one Redis.

    Args: link: for the scripts. watch_link: for the one call that blocks, for `block_ms`. clock: Unix seconds, by Redis.
    """

    def __init__(
        self, link: RedisLink, watch_link: RedisLink, sessions: Sessions, block_ms: int, clock: Callable[[], float]
    ) -> None:
        self._link = link
        self._clock = clock
        self._watch_link = watch_link
        self._sessions = sessions
        self._block_ms = block_ms
        self._change = RunChanges(link, self._woke)
        self._view, self._rest, self._step = Script("run_view"), Script("rest"), Script("step")
        self._waiters = LeaseWaiters()
        self._listener: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await self._change.close()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            self._listener = None

    # -- for the store: what becomes of groups and trials

    async def open_group(self, group: Group) -> None:
        await self._change(
            group.run_id, RunQuery(groups={group.group_id: STATE}), lambda run, now: decide.open_group(run, group),
            now=group.created_at, new=True,
        )  # fmt: skip
        await self._link.write("ZADD", RUNS, "GT", repr(group.created_at), run_tag(group.run_id))

    async def ended(self, run_id: str | None, trial: EndedTrial, now: float) -> None:
        asked = RunQuery(trials=[trial.trial_id], taken=[] if trial.booked else [decide.told(trial)])
        if trial.group_id is not None:
            asked.groups[trial.group_id] = WHOLE if trial.outcome == NotTrained.DELETED else 1
        await self._change(run_id, asked, lambda run, at: decide.ended(run, trial, at), now=now)

    async def settled(self, run_id: str | None, trial: EndedTrial, now: float) -> None:
        """The trial's slot says from now on that its tokens are booked."""
        await self._change(run_id, RunQuery(), lambda run, at: run.settle(decide.told(trial), at), now=now)

    async def came_late(
        self, run_id: str | None, trial_id: str, turn_id: str, tokens: Tokens, reason: str, now: float
    ) -> None:
        await self._change(
            run_id, RunQuery(taken=[decide.late(trial_id, turn_id)]),
            lambda run, at: decide.came_late(run, trial_id, turn_id, tokens, reason, at), now=now, new=True,
        )  # fmt: skip

    async def lets_go(self, run_id: str | None, group_id: str, now: float, *, serve: bool = True) -> bool:
        asked = RunQuery(groups={group_id: 0 if serve else STATE})
        gone: bool = await self._change(
            run_id, asked, lambda run, at: decide.lets_go(run, group_id, at, serve=serve), now=now
        )
        return gone

    async def states(self, run_id: str | None, names: Sequence[str]) -> dict[str, GroupStatus]:
        """How these groups stand, of those that the run knows and that can be read."""
        [found] = await self._link.ask(("HMGET", run_keys(run_id).groups, *names))
        states: dict[str, GroupStatus] = {}
        for name, raw in zip(names, found, strict=True):
            with contextlib.suppress(ValueError, msgspec.MsgspecError):  # who changes the group is told
                if raw is not None:
                    states[name] = read(GroupStatus, raw)
        return states

    async def forget(self, group: Group, now: float, *, archived: bool = False) -> None:
        """None of its trials is here any more. archived: they are in the archive, and lists name it."""
        asked = RunQuery(groups={group.group_id: WHOLE})
        await self._change(
            group.run_id, asked, lambda run, at: decide.forget(run, group.group_id, at, archived=archived), now=now
        )  # fmt: skip

    # -- RunStore

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> GrantedLeases:
        grant, least = new_grant(epoch), max(1, at_least)
        asked = RunQuery(due=DUE_AT_ONCE, most=max(least, request.max_groups), least=least, trainer=epoch is not None)
        if request.request_id is not None:
            asked.requests.append(request.request_id)

        def decided(run: RedisRun, at: float) -> tuple[list[leasing.GrantedGroup], list[float], float | None]:
            groups, next_in_s = leasing.lease(run, request, at_least=at_least, epoch=epoch, grant=grant, now=at)
            return groups, [one.waited_s(at) for one in groups], next_in_s

        groups, waited_s, next_in_s = await self._change(request.run_id, asked, decided, now=now)
        leases = []
        for one in groups:
            sessions = await self._sessions([(trial_id, kept.life) for trial_id, kept in one.brings.items()])
            leases.append(one.lease(request.run_id, sessions))
        return GrantedLeases(leases, waited_s, next_in_s)

    async def _finish(self, name: LeaseName, now: float | None, finish: Callable[[RedisRun, float], Any]) -> Any:
        asked = RunQuery(groups={name.group_id: STATE}, trainer=name.epoch is not None)
        return await self._change(name.run_id, asked, finish, now=now)

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        name = LeaseName.decode(lease_id)
        held_s: float | None = await self._finish(name, now, lambda run, at: leasing.acknowledge(run, name, at))
        return held_s

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        name = LeaseName.decode(lease_id)
        await self._finish(name, now, lambda run, at: leasing.release(run, name))

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        name = LeaseName.decode(lease_id)
        until: float = await self._finish(name, now, lambda run, at: leasing.extend(run, name, ttl_s, used, at))
        return until

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        epoch = await self._change(
            run_id, RunQuery(trainer=True, leased=True),
            lambda run, at: leasing.take_over(run, run_id, trainer, force, at), now=now,
        )  # fmt: skip
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        await self._change(
            run_id, RunQuery(trainer=True),
            lambda run, at: leasing.heartbeat(run, run_id, trainer, epoch, leaving, at), now=now,
        )  # fmt: skip

    async def check_epoch(self, run_id: str | None, epoch: int) -> None:
        [newest] = await self._link.ask(("HGET", run_keys(run_id).trainer, "epoch"))
        if int(newest or 0) > epoch:
            raise superseded(run_id, int(newest))

    async def view(self, run_id: str | None, *, now: float | None = None, ledger: bool = True) -> RunView:
        keys = run_keys(run_id)
        named = [keys.groups, keys.ready, keys.leased, keys.totals, keys.ledger, keys.trainer]
        reply = await self._link.run(self._view, named, ["" if now is None else repr(now), int(ledger)], writes=False)
        at, totals, booked, ready, leased, (name, epoch, heard_at) = reply
        run = RunAccount()
        run.totals.update({key.decode(): int(value) for key, value in _pairs(totals)})
        run.ledger.update({key.decode(): int(value) for key, value in _pairs(booked)})
        run.over = bool(run.totals["rollouts:over"])
        run.trainers[""] = RegisteredTrainer((name or b"").decode(), int(epoch or 0), float(heard_at or 0))
        return overview.view(run_id, run, ready, [read(GroupStatus, raw) for raw in leased], float(at))

    async def groups(self, run_id: str | None, *, now: float | None = None) -> list[GroupPlace]:
        keys = run_keys(run_id)
        here, past = await self._link.ask(("HGETALL", keys.groups), ("HGETALL", keys.past))
        at = self._clock() if now is None else now
        found = []
        for number, (name, raw) in enumerate((past | here).items()):
            if number % LISTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            found.append(overview.listed(name.decode(), read(GroupStatus, raw), at, archived=name not in here))
        return newest_groups(found)

    async def keep_step(self, run_id: str | None, step: TrainingStep) -> TrainingStep:
        key = steps_key(run_id)
        while True:
            [found] = await self._link.ask(("ZRANGEBYSCORE", key, step.step, step.step))
            before = found[0] if found else b""
            kept = step.over(read_json(TrainingStep, before) if before else None)
            args = [step.step, before, kept.model_dump_json(), MOST_STEPS]
            if await self._link.run(self._step, [key], args):
                return kept

    async def steps(self, run_id: str | None, *, start: int, limit: int) -> list[TrainingStep]:
        found: list[TrainingStep] = []
        asked = ("ZRANGEBYSCORE", steps_key(run_id), start, "+inf", "LIMIT", 0, limit)
        for number, raw in enumerate((await self._link.ask(asked))[0]):
            if number % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)
            found.append(read_json(TrainingStep, raw))
        return found

    async def newest(self, limit: int) -> list[tuple[str | None, float]]:
        found: dict[bytes, float] = {}
        for key in (PAST_RUNS, RUNS):  # a run may be in both: it has groups again
            found |= await self._link.call(self._link.client.zrange(key, 0, limit - 1, desc=True, withscores=True))
        newest = sorted(found.items(), key=lambda run: run[1], reverse=True)
        return [(run_id_of(tag.decode()), made_at) for tag, made_at in newest[:limit]]

    async def set_rollouts_over(self, run_id: str | None, over: bool) -> None:
        await self._change(run_id, RunQuery(), lambda run, at: setattr(run, "over", over), now=0.0)

    async def _known(self) -> list[tuple[bytes, bytes]]:
        """Tags of runs that have groups, or had a while ago, and their scores."""
        found = await self._link.ask(("ZRANGE", RUNS, 0, -1, "WITHSCORES"))
        return list(_pairs(found[0]))

    async def close_due(self, *, now: float | None = None) -> None:
        known = [(run_id_of(tag.decode()), tag, score) for tag, score in await self._known()]
        due = RunQuery(due=DUE_AT_ONCE)
        await asyncio.gather(*(self._change(run_id, due, decide.close_due, now=now) for run_id, *_ in known))
        for run_id, tag, score in known:
            keys = run_keys(run_id)
            groups, past = await self._link.ask(("HLEN", keys.groups), ("HLEN", keys.past))
            if past >= MOST_ARCHIVED + ARCHIVED_MORE:
                await self._forget_oldest(keys.past)
            if not groups:
                await self._link.run(self._rest, [RUNS, PAST_RUNS], [tag, score])

    async def _forget_oldest(self, key: str) -> None:
        """Remove all archived groups but the newest MOST_ARCHIVED. Other replicas may do the same meanwhile: only groups that
        this scan finds are counted, so no newer group goes in place of one that another replica removed."""
        made: dict[bytes, float] = {}
        cursor: Any = 0
        while True:
            [(cursor, some)] = await self._link.ask(("HSCAN", key, cursor, "COUNT", SCANNED))
            made |= {name: read(GroupStatus, raw).made_at or 0.0 for name, raw in some.items()}
            if not cursor:
                break
        oldest = sorted(made, key=lambda name: made[name])[: max(0, len(made) - MOST_ARCHIVED)]
        for at in range(0, len(oldest), SCANNED):
            await self._link.write("HDEL", key, *oldest[at : at + SCANNED])

    async def in_hand(self, *, now: float | None = None) -> GroupsInHand:
        known = [run_id_of(tag.decode()) for tag, _ in await self._known()]
        views = await asyncio.gather(*(self.view(run_id, now=now, ledger=False) for run_id in known))
        return GroupsInHand(*(sum(getattr(view.groups, name) for view in views) for name in GroupsInHand._fields))

    # -- waiting

    @contextlib.contextmanager
    def watch(self, run_id: str | None) -> Iterator[asyncio.Event]:
        with self._waiters.watch(run_id) as event:
            if self._listener is None or self._listener.done():
                self._listener = asyncio.create_task(self._listen())
            yield event

    async def _woke(self, run_id: str | None) -> None:
        """A group got ready. A failure to say so costs those who wait elsewhere some seconds, and the caller nothing."""
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


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
