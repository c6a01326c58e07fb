"""Runs and leases in this process: keeps the `RunStore` protocol over `run_state.Run`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from steno.contracts.leases import GroupPlace, Lease, LeaseName, LeaseRequest, RunView, Tenure, newest_groups
from steno.contracts.records import Group, Session
from steno_proxy.store.run_interface import Granted, InHand, Waiters, new_grant
from steno_proxy.store.run_state import Place, Run
from steno_proxy.store.settlement import Ended, Tokens


class MemoryRuns:
    """Args: session: the session of this trial id and life, if it is there."""

    def __init__(self, session: Callable[[str, str], Session | None]) -> None:
        self._session = session
        self._runs: dict[str | None, Run] = {}
        self._waiters = Waiters()

    def _run(self, run_id: str | None) -> Run:
        return self._runs.setdefault(run_id, Run(run_id))

    # -- for the store: what becomes of groups and trials. Each may make a group ready.

    def open_group(self, group: Group) -> None:
        self._run(group.run_id).open_group(group)

    def ended(self, run_id: str | None, trial: Ended, now: float) -> None:
        self._run(run_id).ended(trial, now)
        self._waiters.wake(run_id)

    def came_late(self, run_id: str | None, trial_id: str, turn_id: str, tokens: Tokens, reason: str) -> None:
        self._run(run_id).came_late(trial_id, turn_id, tokens, reason)

    def lets_go(self, run_id: str | None, group_id: str, now: float) -> bool:
        gone = self._run(run_id).lets_go(group_id, now)
        self._waiters.wake(run_id)
        return gone

    def forget(self, group: Group, now: float) -> None:
        self._run(group.run_id).forget(group.group_id, now)
        self._waiters.wake(group.run_id)

    # -- RunStore

    async def lease(
        self, request: LeaseRequest, *, at_least: int, epoch: int | None = None, now: float | None = None
    ) -> Granted:
        run, at = self._run(request.run_id), _at(now)
        run.check_epoch(epoch)
        places = run.lease(
            request.consumer, request.max_groups, at_least, request.ttl_s, request.request_id, new_grant(epoch), at
        )
        leases = [self._lease(request.run_id, place) for place in places]
        return Granted(leases, [max(0.0, at - place.ready_at) for place in places], run.next_in_s(at))

    def _lease(self, run_id: str | None, place: Place) -> Lease:
        tokens = place.brings()
        found = [self._session(trial_id, place.trials[trial_id].life) for trial_id in tokens]
        return Lease(
            lease_id=LeaseName(run_id, place.group.group_id, place.granted).encode(),
            group=place.group.model_copy(deep=True),
            trials=[session for session in found if session is not None],
            left_out=place.left_out(),
            tokens=tokens,
            expires_at=place.expires_at,
            grants=place.grants,
        )

    async def acknowledge(self, lease_id: str, *, now: float | None = None) -> float | None:
        name = LeaseName.decode(lease_id)
        return self._run(name.run_id).acknowledge(name, _at(now))

    async def release(self, lease_id: str, *, now: float | None = None) -> None:
        name = LeaseName.decode(lease_id)
        self._run(name.run_id).release(name)
        self._waiters.wake(name.run_id)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False, now: float | None = None) -> float:
        name = LeaseName.decode(lease_id)
        return self._run(name.run_id).extend(name, ttl_s, used, _at(now))

    async def take_over(
        self, run_id: str | None, trainer: str, *, force: bool = False, now: float | None = None
    ) -> Tenure:
        epoch = self._run(run_id).take_over(trainer, force, _at(now))
        self._waiters.wake(run_id)
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)

    async def heartbeat(
        self, run_id: str | None, trainer: str, epoch: int, *, leaving: bool = False, now: float | None = None
    ) -> None:
        self._run(run_id).heartbeat(trainer, epoch, leaving, _at(now))

    async def check_epoch(self, run_id: str | None, epoch: int) -> None:
        self._runs.get(run_id, Run(run_id)).check_epoch(epoch)

    async def view(self, run_id: str | None, *, now: float | None = None) -> RunView:
        return self._runs.get(run_id, Run(run_id)).view(_at(now))

    async def groups(self, run_id: str | None, *, now: float | None = None) -> list[GroupPlace]:
        run = self._runs.get(run_id)
        return newest_groups(run.listed(_at(now))) if run is not None else []

    async def newest(self, limit: int) -> list[tuple[str | None, float]]:
        made = [(run_id, run.newest_at) for run_id, run in self._runs.items() if run.newest_at is not None]
        return sorted(made, key=lambda pair: pair[1], reverse=True)[:limit]

    async def rollouts(self, run_id: str | None, over: bool) -> None:
        self._run(run_id).rollouts_over = over

    async def close_due(self, *, now: float | None = None) -> None:
        for run_id, run in self._runs.items():
            run.close_due(_at(now))
            self._waiters.wake(run_id)

    async def in_hand(self, *, now: float | None = None) -> InHand:
        views = [run.view(_at(now)).groups for run in self._runs.values()]
        return InHand(*(sum(getattr(view, name) for view in views) for name in InHand._fields))

    def watch(self, run_id: str | None) -> contextlib.AbstractContextManager[asyncio.Event]:
        return self._waiters.watch(run_id)


def _at(now: float | None) -> float:
    return time.time() if now is None else now
