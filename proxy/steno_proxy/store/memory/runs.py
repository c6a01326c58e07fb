"""Runs and leases in this process: keeps the `RunStore` protocol over the decisions of `store/runs/`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from heapq import nsmallest

from steno.contracts.records import Group, Session
from steno.contracts.runs.leases import GroupPlace, LeaseName, LeaseRequest, RunView, Tenure, newest_groups
from steno.contracts.runs.training_steps import MOST_STEPS, TrainingStep
from steno_proxy.store.runs import decisions as decide
from steno_proxy.store.runs import leasing, overview
from steno_proxy.store.runs.account import REQUEST_TTL_S, TAKEN_S, RunAccount
from steno_proxy.store.runs.interface import GrantedLeases, GroupsInHand, LeaseWaiters, new_grant
from steno_proxy.store.runs.settlement import EndedTrial, Tokens

LOOK_S = 60.0
"""Seconds between two removals of old entries from `taken`."""


class MemoryRun(RunAccount):
    """A whole run in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: dict[str, float] = {}  # request id -> until when its answer is remembered
        self.newest_at: float | None = None
        self.steps: dict[int, TrainingStep] = {}
        self._looked_at = 0.0

    def forget_old(self, now: float) -> None:
        """Forget the requests, and from time to time the entries of `taken`, that are past their time."""
        for asked in [asked for asked, until in self.requested.items() if until <= now]:
            del self.requested[asked], self.requests[asked]
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self.taken = {name: at for name, at in self.taken.items() if at > now - TAKEN_S}

    def view(self, run_id: str | None, now: float, *, ledger: bool) -> RunView:
        held = [status for name in self.leased() if not (status := self.groups[name]).expired(now)]
        return overview.view(run_id, self, len(list(self.waiting(now))), held, now, ledger=ledger)


class MemoryRuns:
    """Keeps the `RunStore` protocol, in this process only.

    Args: session: the session of this trial id and life, if it is there.
    """

    def __init__(self, session: Callable[[str, str], Session | None]) -> None:
        self._session = session
        self._runs: dict[str | None, MemoryRun] = {}
        self._waiters = LeaseWaiters()

    def _run(self, run_id: str | None) -> MemoryRun:
        return self._runs.setdefault(run_id, MemoryRun())

    # -- for the store: what becomes of groups and trials. Each may make a group ready.

    def open_group(self, group: Group) -> None:
        run = self._run(group.run_id)
        decide.open_group(run, group)
        run.newest_at = max(run.newest_at or 0.0, group.created_at)

    def ended(self, run_id: str | None, trial: EndedTrial, now: float) -> None:
        """The caller notes that the trial's tokens are booked."""
        run = self._run(run_id)
        decide.ended(run, trial, now)
        if (told := decide.told(trial)) in run.taken:
            run.taken[told] = now
        run.forget_old(now)
        self._waiters.wake(run_id)

    def came_late(
        self, run_id: str | None, trial_id: str, turn_id: str, tokens: Tokens, reason: str, now: float
    ) -> None:
        decide.came_late(self._run(run_id), trial_id, turn_id, tokens, reason, now)

    def lets_go(self, run_id: str | None, group_id: str, now: float) -> bool:
        gone = decide.lets_go(self._run(run_id), group_id, now)
        self._waiters.wake(run_id)
        return gone

    def forget(self, group: Group, now: float) -> None:
        decide.forget(self._run(group.run_id), group.group_id, now)
        self._waiters.wake(group.run_id)

    # -- RunStore

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> GrantedLeases:
        run, at = self._run(request.run_id), _at(now)
        run.forget_old(at)
        found, next_in_s = leasing.lease(
            run, request, at_least=at_least, epoch=epoch, grant=new_grant(epoch), now=at
        )  # fmt: skip
        if request.request_id is not None and request.request_id in run.requests:
            run.requested.setdefault(request.request_id, at + REQUEST_TTL_S)
        leases = []
        for one in found:
            sessions = [self._session(trial_id, kept.life) for trial_id, kept in one.brings.items()]
            own = one._replace(record=one.record.model_copy(deep=True))
            leases.append(own.lease(request.run_id, [session for session in sessions if session is not None]))
        return GrantedLeases(leases, [one.waited_s(at) for one in found], next_in_s)

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        name = LeaseName.decode(lease_id)
        return leasing.acknowledge(self._run(name.run_id), name, _at(now))

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        name = LeaseName.decode(lease_id)
        leasing.release(self._run(name.run_id), name)
        self._waiters.wake(name.run_id)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        name = LeaseName.decode(lease_id)
        return leasing.extend(self._run(name.run_id), name, ttl_s, used, _at(now))

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        epoch = leasing.take_over(self._run(run_id), run_id, trainer, force, _at(now))
        self._waiters.wake(run_id)
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        leasing.heartbeat(self._run(run_id), run_id, trainer, epoch, leaving, _at(now))

    async def check_epoch(self, run_id: str | None, epoch: int) -> None:
        leasing.check_epoch(self._runs.get(run_id, MemoryRun()), run_id, epoch)

    async def view(self, run_id: str | None, *, now: float | None = None, ledger: bool = True) -> RunView:
        return self._runs.get(run_id, MemoryRun()).view(run_id, _at(now), ledger=ledger)

    async def groups(self, run_id: str | None, *, now: float | None = None) -> list[GroupPlace]:
        run = self._runs.get(run_id, MemoryRun())
        return newest_groups(overview.listed(name, status, _at(now)) for name, status in run.groups.items())

    async def keep_step(self, run_id: str | None, step: TrainingStep) -> TrainingStep:
        steps = self._run(run_id).steps
        kept = steps[step.step] = step.over(steps.get(step.step))
        if len(steps) > MOST_STEPS:
            del steps[min(steps)]
        return kept

    async def steps(self, run_id: str | None, *, start: int, limit: int) -> list[TrainingStep]:
        steps = self._runs.get(run_id, MemoryRun()).steps
        return [steps[number] for number in nsmallest(limit, (each for each in steps if each >= start))]

    async def newest(self, limit: int) -> list[tuple[str | None, float]]:
        made = [(run_id, run.newest_at) for run_id, run in self._runs.items() if run.newest_at is not None]
        return sorted(made, key=lambda pair: pair[1], reverse=True)[:limit]

    async def set_rollouts_over(self, run_id: str | None, over: bool) -> None:
        self._run(run_id).over = over

    async def close_due(self, *, now: float | None = None) -> None:
        for run_id, run in self._runs.items():
            decide.close_due(run, _at(now))
            self._waiters.wake(run_id)

    async def in_hand(self, *, now: float | None = None) -> GroupsInHand:
        views = [run.view(run_id, _at(now), ledger=False).groups for run_id, run in self._runs.items()]
        return GroupsInHand(*(sum(getattr(view, name) for view in views) for name in GroupsInHand._fields))

    def watch(self, run_id: str | None) -> contextlib.AbstractContextManager[asyncio.Event]:
        return self._waiters.watch(run_id)


def _at(now: float | None) -> float:
    return time.time() if now is None else now
