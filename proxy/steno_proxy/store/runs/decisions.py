"""What becomes of a run's trials and groups, and of their tokens (I4); `leasing.py` says who holds them. The one definition,
for both stores. Pure: no I/O, and time is an argument.

    running --all ended, or due--> ready <--released, or not acknowledged in time--> leased --acknowledged--> acknowledged
       \\--nothing to train--> empty          evaluation: running --> over

The tokens that a group leaves out are booked when it leaves `running`, and those of a trial that is deleted between then and
the group's first grant, at that deletion. After the first grant, no deletion changes what the group brings.

Each function reads and changes a `RunAccount`. Memory holds a whole one. Redis reads the parts that a function asks for, and
writes what it changed if these parts are still the same. So a function may run again: it raises before it changes
anything, and does not repeat what is done already. Args of all: now: Unix seconds.
"""

from __future__ import annotations

from msgspec.structs import replace

from steno.contracts.records import Group
from steno.contracts.runs.leases import NotTrained
from steno_proxy.store.runs.account import (
    NOT_SETTLED,
    GroupState,
    GroupStatus,
    RunAccount,
    TrialAccount,
)
from steno_proxy.store.runs.settlement import TRAIN, EndedTrial, Tokens


def open_group(run: RunAccount, group: Group) -> None:
    """Register a group. Idempotent. A new training group says that its run's rollouts are not over.

    A group whose sessions are gone (`forsaken`) becomes a new group, unless it is still queued: then its new sessions belong to
    the queued group. Of the earlier group only the acknowledgement stays, since a trainer may repeat it.
    """
    before = run.groups.get(group.group_id)
    if before is not None and before.forsaken and before.queued:
        run.groups[group.group_id] = replace(before, forsaken=0)
    if before is not None and (before.queued or not before.forsaken):
        return
    if before is not None:
        drop_trials(run, group.group_id)
    run.records[group.group_id] = group
    run.groups[group.group_id] = GroupStatus(
        state=GroupState.RUNNING, purpose=group.purpose, size=len(group.trial_ids), final=0, grants=0, made_at=group.created_at,
        settled="" if before is None else before.settled,
    )  # fmt: skip
    run.totals[f"{group.purpose}:running"] += 1
    if group.purpose == "train":
        run.over = False


def ended(run: RunAccount, trial: EndedTrial, now: float) -> None:
    """Note that a trial has ended, or that more is known of its end. An older state never replaces a newer one. The tokens of
    each life of a trial count once: `taken` says that they are booked until the trial's own record says so."""
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
        _keep(run, trial, status, before, now, first=first)
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


def _keep(
    run: RunAccount, trial: EndedTrial, status: GroupStatus, before: TrialAccount | None, now: float, *, first: bool
) -> None:
    outcome, final = str(trial.outcome), int(trial.final)
    if before is None and not first:
        # It ended before its group was there, so its tokens are counted as late, and bring the group nothing.
        kept = TrialAccount(life=trial.life, outcome=str(NotTrained.LATE), final=1, tokens={})
    elif before is None:
        kept = TrialAccount(life=trial.life, outcome=outcome, final=final, tokens=dict(trial.tokens))
    elif before.outcome == NotTrained.UNSCORED or (  # what was late stays late
        trial.outcome == NotTrained.DELETED and before.outcome != NotTrained.LATE
    ):
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


def lets_go(run: RunAccount, name: str, now: float, *, serve: bool = True) -> bool:
    """Whether a trial of this group that is past its retention may be dropped. One that runs for so long is served as it is
    first; what waits for a lease, or is leased, is kept.

    Args: serve: False: a group that runs goes on, and its trials are kept.
    """
    status = run.groups.get(name)
    if serve and status is not None and status.purpose != "eval":
        close(run, name, now)
    return not holds(run.groups.get(name), serve=serve)


def holds(status: GroupStatus | None, *, serve: bool = True) -> bool:
    """Whether a group keeps a trial of its own that is past its retention. Args: status: None: nobody knows the group. serve: as
    `lets_go`, which is to be asked of a group that runs."""
    if status is None or status.purpose == "eval":
        return False
    return status.queued or (status.state is GroupState.RUNNING and not serve)


def forget(run: RunAccount, name: str, now: float, *, archived: bool = False) -> None:
    """Forget a group whose last session is gone. A group that waits for a lease, or is leased, is kept until it is acknowledged.
    archived: its sessions are in the archive, and lists name it."""
    if not archived:
        run.past.pop(name, None)
    if name not in run.groups:
        return
    close(run, name, now)
    status = run.groups[name]
    if status.queued:
        run.groups[name] = replace(status, forsaken=1)
        return
    drop_trials(run, name)
    del run.groups[name]
    if archived:
        run.past[name] = GroupStatus(
            state=status.state, purpose=status.purpose, size=status.size, final=status.final, grants=status.grants,
            made_at=status.made_at,
        )  # fmt: skip


def drop_trials(run: RunAccount, name: str) -> None:
    """Let go of what is kept of a group's trials, and of its record."""
    for trial_id in _trial_ids(run, name):
        run.trials.pop(trial_id, None)
    run.records.pop(name, None)
