"""Which launcher has a trial (`contracts/runs/claims.py`). Pure: no I/O, and time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from steno.contracts.errors import Conflict


class TrialClaim(NamedTuple):
    """epoch: 0: nobody has claimed the trial. expires_at: Unix seconds."""

    epoch: int = 0
    launcher: str = ""
    expires_at: float = 0.0


class Claimed(NamedTuple):
    """What a request for a trial came to. claim: that holds now. taken_over: from another launcher, whose key opens nothing any
    more."""

    claim: TrialClaim
    granted: bool
    taken_over: bool


def claimed(
    before: TrialClaim, launcher: str, ttl_s: float, now: float, *, is_open: bool, awaits_reward: bool = False,
    gone: Collection[str] = (),
) -> Claimed:  # fmt: skip
    """Grant the claim if no launcher has the trial, this one has it, or the one that had it is gone or did not renew in time. A
    launcher that names itself as gone takes over from itself: it is not known whether what it ran in the trial still runs.

    An ended trial that awaits its reward may be claimed too, by the launcher that scores it: nothing of it runs; its key stays.
    """
    if not is_open and not awaits_reward:
        return Claimed(before, granted=False, taken_over=False)
    if before.epoch and before.launcher == launcher and launcher not in gone:
        return Claimed(before._replace(expires_at=now + ttl_s), granted=True, taken_over=False)
    if before.epoch and before.expires_at > now and before.launcher not in gone:
        return Claimed(before, granted=False, taken_over=False)
    return Claimed(
        TrialClaim(before.epoch + 1, launcher, now + ttl_s), granted=True, taken_over=is_open and before.epoch > 0
    )


def check_claim(trial_id: str, before: TrialClaim, epoch: int | None) -> None:
    """Raises: Conflict: another launcher has the trial by now. epoch: of the claim under which it is ended; None: no claim."""
    if epoch is not None and epoch != before.epoch:
        raise lost(trial_id, epoch, before.epoch)


def lost(trial_id: str, epoch: int, newest: int) -> Conflict:
    """The error for a launcher whose claim another one has taken over."""
    return Conflict(
        f"claim: session {trial_id} was claimed by another launcher meanwhile: got claim {epoch}, the newest is {newest}",
        field="claim",
    )
