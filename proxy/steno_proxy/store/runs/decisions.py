"""What happens to a run's groups, leases and accounts (I4): the one definition of it. Pure: no I/O, and time is an argument.

    running --all ended, or due--> ready <--released, or not acknowledged in time--> leased --acknowledged--> acknowledged
       \\--nothing to train--> empty          evaluation: running --> over

What a group leaves out is booked when it leaves `running`, and with what is deleted until its first grant. From then on
what it brings does not change, whatever is deleted.

Each function reads and changes a `RunAccount`. Memory holds a whole one. Redis reads the parts that a function asks for, and
writes what it changed if these parts are still the same. So a function may run again: it raises before it changes
anything, and what it has done already it finds done. Args of all: now: Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.leases import (
    ALIVE_S,
    EvalGroups,
    GroupPlace,
    Lease,
    LeaseName,
    LeaseRequest,
    NotTrained,
    RunGroups,
    RunView,
    run_trainer,
)
from steno.contracts.records import Group, Session
from steno_proxy.store.runs.account import (
    NOT_SETTLED,
    GroupState,
    GroupStatus,
    RegisteredTrainer,
    RunAccount,
    TrialAccount,
)
from steno_proxy.store.runs.interface import alive, superseded
from steno_proxy.store.runs.settlement import TRAIN, EndedTrial, Tokens

# -- what becomes of trials


def open_group(run: RunAccount, group: Group) -> None:
    """Register a group. Idempotent. A new one to be trained says that its run's rollouts are not over."""
    if group.group_id in run.groups:
        return
    run.records[group.group_id] = group
    run.groups[group.group_id] = GroupStatus(
        state=GroupState.RUNNING, purpose=group.purpose, size=len(group.trial_ids), final=0, grants=0, made_at=group.created_at
    )  # fmt: skip
    run.totals[f"{group.purpose}:running"] += 1
    if group.purpose == "train":
        run.over = False


def ended(run: RunAccount, trial: EndedTrial, now: float) -> None:
    """A trial has ended, or more is known of its end. What was known earlier never undoes what was known later. Tokens count
    once per life of a trial: until its own record says that they are booked, `taken` does."""
    life = told(trial)
    first = not trial.booked and life not in run.taken
    if first:
        run.taken[life] = NOT_SETTLED
        run.book(trial.tokens, borrowed=trial.borrowed)

    def untrained(reason: str) -> None:
        if first:
            run.book(trial.tokens, reason)

    if trial.group_id is None:
        untrained(NotTrained.UNGROUPED)
        return
    status = run.groups.get(trial.group_id)
    if status is None:
        untrained(NotTrained.LATE)
        return
    evaluated = status.purpose == "eval"
    if evaluated:
        untrained(NotTrained.EVALUATION)
    before = run.trials.get(trial.trial_id)
    if before is not None and before.life != trial.life:
        if not evaluated:
            untrained(NotTrained.LATE)
    elif status.state is GroupState.RUNNING:
        _keep(run, trial, status, before, now)
    elif evaluated:
        return
    elif before is None:
        run.trials[trial.trial_id] = TrialAccount(life=trial.life, outcome=str(NotTrained.LATE), final=1, tokens={})
        untrained(NotTrained.LATE)
    elif trial.outcome == NotTrained.DELETED and before.outcome == TRAIN and not status.grants:
        _leave_out(run, trial, status, before)


def told(trial: EndedTrial) -> str:
    """How `taken` names the end of a trial."""
    return f"{trial.trial_id}/{trial.life}"


def _keep(run: RunAccount, trial: EndedTrial, status: GroupStatus, before: TrialAccount | None, now: float) -> None:
    outcome, final = str(trial.outcome), int(trial.final)
    if before is None:
        kept = TrialAccount(life=trial.life, outcome=outcome, final=final, tokens=dict(trial.tokens))
    elif trial.outcome == NotTrained.DELETED or before.outcome == NotTrained.UNSCORED:
        kept = replace(before, outcome=outcome, final=before.final | final)
    else:
        return
    assert trial.group_id is not None
    run.trials[trial.trial_id] = kept
    status = replace(status, final=status.final + kept.final - (before.final if before is not None else 0))
    run.groups[trial.group_id] = status
    if status.final == status.size:
        close(run, trial.group_id, now)


def _leave_out(run: RunAccount, trial: EndedTrial, status: GroupStatus, before: TrialAccount) -> None:
    """Deleted before its group's first lease."""
    assert trial.group_id is not None
    run.trials[trial.trial_id] = replace(before, outcome=str(NotTrained.DELETED))
    run.book(before.tokens, NotTrained.DELETED)
    if status.state is GroupState.READY and not _trainable(run, trial.group_id):
        run.groups[trial.group_id] = replace(status, state=GroupState.EMPTY)
        run.totals["train:empty"] += 1


def _trial_ids(run: RunAccount, name: str) -> list[str]:
    record = run.records.get(name)
    return record.trial_ids if record is not None else []


def _trainable(run: RunAccount, name: str) -> bool:
    kept = (run.trials.get(trial_id) for trial_id in _trial_ids(run, name))
    return any(one is not None and one.outcome == TRAIN and sum(one.tokens.values()) for one in kept)


def close(run: RunAccount, name: str, now: float) -> None:
    """Serve a running group as it is. Nothing, if it does not run."""
    status = run.groups.get(name)
    if status is None or status.state is not GroupState.RUNNING:
        return
    run.totals[f"{status.purpose}:running"] -= 1
    if status.purpose == "eval":
        run.groups[name] = replace(status, state=GroupState.OVER)
        run.totals["eval:ended"] += 1
        return
    for trial_id in _trial_ids(run, name):
        kept = run.trials.get(trial_id)
        if kept is not None and kept.outcome != TRAIN:
            run.book(kept.tokens, kept.outcome)
    if _trainable(run, name):
        run.groups[name] = replace(status, state=GroupState.READY, ready_at=now, order=run.next_order())
    else:
        run.groups[name] = replace(status, state=GroupState.EMPTY)
        run.totals["train:empty"] += 1


def close_due(run: RunAccount, now: float) -> None:
    """Close the groups that are past their deadline."""
    names = run.due(now)
    run.whole(names)
    for name in names:
        close(run, name, now)


def came_late(run: RunAccount, trial_id: str, turn_id: str, tokens: Tokens, reason: str, now: float) -> None:
    """Count the tokens of a turn that its trial's record does not take any more. Once per turn."""
    turn = late(trial_id, turn_id)
    if turn not in run.taken:
        run.taken[turn] = now
        run.book(tokens)
        run.book(tokens, reason)


def late(trial_id: str, turn_id: str) -> str:
    """How `taken` names tokens that came late."""
    return f"{trial_id}/turn/{turn_id}"


def lets_go(run: RunAccount, name: str, now: float) -> bool:
    """Whether a trial of this group that is past its retention may be dropped. One that runs for so long is served as it is
    first; what waits for a lease, or is leased, is kept."""
    status = run.groups.get(name)
    if status is None or status.purpose == "eval":
        return True
    close(run, name, now)
    return not run.groups[name].queued


def forget(run: RunAccount, name: str, now: float, *, archived: bool = False) -> None:
    """The last session of a group is gone. What is leased or was is kept until it is acknowledged. archived: its sessions are in
    the archive, and lists name it."""
    if not archived:
        run.past.pop(name, None)
    if name not in run.groups:
        return
    close(run, name, now)
    status = run.groups[name]
    if status.queued:
        run.groups[name] = replace(status, forsaken=1)
        return
    _drop(run, name)
    del run.groups[name]
    if archived:
        run.past[name] = GroupStatus(
            state=status.state, purpose=status.purpose, size=status.size, final=status.final, grants=status.grants,
            made_at=status.made_at,
        )  # fmt: skip


def _drop(run: RunAccount, name: str) -> None:
    for trial_id in _trial_ids(run, name):
        run.trials.pop(trial_id, None)
    run.records.pop(name, None)


# -- leases


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

    Args: epoch, grant: of what is granted; grant is new. Returns also: where nothing is granted, for how many seconds nothing
    gets ready by itself, as far as is known.
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
        _drop(run, name.group_id)
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


# -- whose the run is


def check_epoch(run: RunAccount, run_id: str | None, epoch: int | None) -> None:
    """Raises: Superseded: a trainer with a newer epoch has the run."""
    if epoch is not None and epoch < (newest := _trainer(run).epoch):
        raise superseded(run_id, newest)


def _trainer(run: RunAccount) -> RegisteredTrainer:
    return run.trainers.get("", RegisteredTrainer())


def take_over(run: RunAccount, run_id: str | None, trainer: str, force: bool, now: float) -> int:
    """Give the run to a trainer; what older epochs have leased can be leased again. Returns: its epoch. Raises: TrainerAlive."""
    before = _trainer(run)
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
    before = _trainer(run)
    if epoch < before.epoch or (epoch == before.epoch and trainer != before.name):
        raise superseded(run_id, before.epoch)
    run.trainers[""] = RegisteredTrainer(trainer, epoch, 0.0 if leaving else now)


# -- what operators see


def view(run_id: str | None, run: RunAccount, ready: int, leased: Iterable[GroupStatus], now: float) -> RunView:
    """What `GET /runs/{run_id}` gives.

    Args: run: totals, ledger, trainer, `over`. ready: how many groups can be leased. leased: those whose time is not over.
    """
    held, totals = list(leased), run.totals
    used = sum(status.used for status in held)
    found = RunView(
        run_id=run_id,
        groups=RunGroups(
            running=totals["train:running"], ready=ready, leased=len(held) - used, used=used,
            acknowledged=totals["train:acknowledged"], empty=totals["train:empty"],
        ),
        eval_groups=EvalGroups(running=totals["eval:running"], ended=totals["eval:ended"]),
        rollouts_over=bool(run.over),
        trainer=run_trainer(*_trainer(run), now),
    )  # fmt: skip
    for entry, tokens in run.ledger.items():
        side, _, rest = entry.partition(":")
        if side == "s":
            found.sampled[rest] = tokens
        elif side == "b":
            found.borrowed[rest] = tokens
        else:
            reason, _, version = rest.partition(":")
            found.not_trained.setdefault(reason, {})[version] = tokens
    return found


def listed(name: str, status: GroupStatus, now: float, *, archived: bool = False) -> GroupPlace:
    """A group as `GET /groups` gives it."""
    state = GroupState.READY if status.expired(now) else status.state
    return GroupPlace(
        group_id=name, purpose=status.purpose, state=state, size=status.size, ended=status.final, grants=status.grants,
        trainer=status.consumer if state is GroupState.LEASED else None, created_at=status.made_at,
        archived=archived,
    )  # fmt: skip
