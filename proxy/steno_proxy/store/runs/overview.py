"""What operators see of a run and its groups."""

from __future__ import annotations

from collections.abc import Iterable

from steno.contracts.runs.leases import EvalGroups, GroupPlace, RunGroups, RunView, run_trainer
from steno_proxy.store.runs.account import GroupState, GroupStatus, RunAccount


def view(
    run_id: str | None,
    run: RunAccount,
    ready: int,
    leased: Iterable[GroupStatus],
    now: float,
    *,
    ledger: bool = True,
) -> RunView:
    """What `GET /runs/{run_id}` gives.

    Args: run: totals, ledger, trainer, `over`. ready: how many groups can be leased. leased: those whose time is not over.
        ledger: False: without the tokens.
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
        trainer=run_trainer(*run.trainer, now),
    )  # fmt: skip
    for entry, tokens in run.ledger.items() if ledger else ():
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
