"""Who holds a run's groups (I4): leases, and the trainer that has the run. Pure, as `decisions.py`, over a `RunAccount`."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.records import Group, Session
from steno.contracts.runs.leases import ALIVE_S, Lease, LeaseName, LeaseRequest, NotTrained
from steno_proxy.store.runs.account import GroupState, GroupStatus, RegisteredTrainer, RunAccount, TrialAccount
from steno_proxy.store.runs.decisions import close_due, drop_trials
from steno_proxy.store.runs.interface import alive, superseded
from steno_proxy.store.runs.settlement import TRAIN


class GrantedGroup(NamedTuple):
    """A group as its lease brings it. trials: None: it had not ended."""

    status: GroupStatus
    record: Group
    trials: dict[str, TrialAccount | None]

    @property
    def brings(self) -> dict[str, TrialAccount]:
        return {trial_id: kept for trial_id, kept in self.trials.items() if kept is not None and kept.outcome == TRAIN}

    def waited_s(self, now: float) -> float:
        """Since it got ready."""
        return max(0.0, now - (now if self.status.ready_at is None else self.status.ready_at))

    def lease(self, run_id: str | None, trials: list[Session]) -> Lease:
        """Args: trials: the sessions of what it brings, as far as they are there."""
        assert self.status.expires_at is not None
        brings = self.brings
        left_out = {
            trial_id: kept.outcome if kept is not None else str(NotTrained.LATE)
            for trial_id, kept in self.trials.items()
            if trial_id not in brings
        }
        return Lease(
            lease_id=LeaseName(run_id, self.record.group_id, self.status.granted).encode(),
            group=self.record, trials=trials, left_out=left_out,
            tokens={trial_id: dict(kept.tokens) for trial_id, kept in brings.items()},
            expires_at=self.status.expires_at, grants=self.status.grants,
        )  # fmt: skip


def lease(
    run: RunAccount, request: LeaseRequest, *, at_least: int, epoch: int | None, grant: str, now: float
) -> tuple[list[GrantedGroup], float | None]:
    """Grant up to `max_groups` groups; none, if fewer than `at_least` can be.

    Args: epoch: the trainer's. grant: new; the fencing tokens of these grants begin with it. Returns: the groups; and, if none
    is granted, the seconds until one may get ready by itself (None: not known).
    """
    check_epoch(run, request.run_id, epoch)
    close_due(run, now)
    asked = request.request_id
    if asked is not None and (held := run.requests.get(asked)) is not None:
        run.whole([name for name, _ in held])
        still = [name for name, token in held if (status := run.groups.get(name)) and status.held_by(token)]
        return [_granted(run, name) for name in still], None
    least = max(1, at_least)
    names = list(islice(run.waiting(now), max(least, request.max_groups)))
    if len(names) < least:
        at = run.next_at(now)
        return [], None if at is None else at - now
    names = names[: request.max_groups]
    run.whole(names)
    for number, name in enumerate(names):
        status = run.groups[name]
        run.groups[name] = replace(
            status, state=GroupState.LEASED, consumer=request.consumer, granted_at=now, expires_at=now + request.ttl_s,
            granted=f"{grant}{number}", grants=status.grants + 1, used=False,
        )  # fmt: skip
    if asked is not None:
        run.requests[asked] = [(name, run.groups[name].granted) for name in names]
    return [_granted(run, name) for name in names], None


def _granted(run: RunAccount, name: str) -> GrantedGroup:
    record = run.records[name]
    return GrantedGroup(run.groups[name], record, {trial_id: run.trials.get(trial_id) for trial_id in record.trial_ids})


def acknowledge(run: RunAccount, name: LeaseName, now: float) -> float | None:
    """Acknowledge a lease. Returns: how long it was held, in seconds; None: it was acknowledged before."""
    status = _status(run, name)
    if status.settled == name.grant:
        return None
    _check_held(status, name)
    run.groups[name.group_id] = replace(status, state=GroupState.ACKNOWLEDGED, settled=name.grant, granted="")
    run.totals["train:acknowledged"] += 1
    if status.forsaken:
        drop_trials(run, name.group_id)
    return max(0.0, now - (now if status.granted_at is None else status.granted_at))


def release(run: RunAccount, name: LeaseName) -> None:
    """Release a lease: its group can be leased again at once."""
    status = _status(run, name)
    if status.let_go != name.grant:
        _check_held(status, name)
        run.groups[name.group_id] = replace(status, state=GroupState.READY, let_go=name.grant, granted="")


def extend(run: RunAccount, name: LeaseName, ttl_s: float, used: bool, now: float) -> float:
    """Extend a lease. Returns: when it ends, Unix seconds."""
    status = _status(run, name)
    _check_held(status, name)
    run.groups[name.group_id] = replace(status, expires_at=now + ttl_s, used=status.used or used)
    return now + ttl_s


def _status(run: RunAccount, name: LeaseName) -> GroupStatus:
    check_epoch(run, name.run_id, name.epoch)
    status = run.groups.get(name.group_id)
    if status is None:
        raise NotFound(f"no group {name.group_id} is leased")
    return status


def _check_held(status: GroupStatus, name: LeaseName) -> None:
    if not status.held_by(name.grant):
        raise Conflict(f"group {name.group_id} is not held under this lease any more")


def check_epoch(run: RunAccount, run_id: str | None, epoch: int | None) -> None:
    """Raises: Superseded: a trainer with a newer epoch has the run."""
    if epoch is not None and epoch < (newest := run.trainer.epoch):
        raise superseded(run_id, newest)


def take_over(run: RunAccount, run_id: str | None, trainer: str, force: bool, now: float) -> int:
    """Give the run to a trainer; what older epochs have leased can be leased again. Returns: its epoch. Raises: TrainerAlive."""
    before = run.trainer
    if before.epoch and before.name == trainer:
        return before.epoch
    left_s = before.heard_at + ALIVE_S - now
    if not force and left_s > 0:
        raise alive(run_id, before.name, left_s)
    run.trainers[""] = RegisteredTrainer(trainer, before.epoch + 1, now)
    for name in run.leased():
        status = run.groups[name]
        if status.state is GroupState.LEASED and LeaseName(run_id, name, status.granted).epoch is not None:
            run.groups[name] = replace(status, state=GroupState.READY, granted="")
    return before.epoch + 1


def heartbeat(run: RunAccount, run_id: str | None, trainer: str, epoch: int, leaving: bool, now: float) -> None:
    """Note that the run's trainer lives, or leaves. Raises: Superseded."""
    before = run.trainer
    if epoch < before.epoch or (epoch == before.epoch and trainer != before.name):
        raise superseded(run_id, before.epoch)
    run.trainers[""] = RegisteredTrainer(trainer, epoch, 0.0 if leaving else now)
