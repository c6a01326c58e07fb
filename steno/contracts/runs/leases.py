"""Completed groups on their way to a trainer: bodies of `/leases` and `/runs`.

A group is ready when all its trials have ended, or at its deadline with those that have. It is leased to one trainer at a time,
and acknowledged once the step that used it is durable. A lease that is neither acknowledged nor extended in time is served again,
under a new lease_id; a trainer that finds a group in its checkpoint's ledger acknowledges it and trains nothing.

A trainer may register with its run (`POST /runs/{run_id}/trainer`): it takes over from the one before, which gets 409
`superseded` from then on, and whose leases are served again at once. Trainers register, leasing never does; one that does not
register is neither superseded nor taken over from.

Who accounts for which tokens (I4): the proxy for those that a group leaves out when it gets ready (`RunView.not_trained`), the
trainer for those that the group brings (`Lease.tokens`), which are settled at its first grant and the same in every later one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from steno.contracts.errors import NotFound
from steno.contracts.records import Group, Session

CONSUMER = r"^[A-Za-z0-9._-]{1,128}$"
REQUEST_ID = r"^[A-Za-z0-9._-]{1,64}$"
MOST_LEASES = 256
"""In one request."""
EPOCH_HEADER = "steno-epoch"
"""The epoch under which a registered trainer leases and publishes. A header, since a replica of an older version refuses a field
that it does not know, and ignores a header."""
HEARTBEAT_S = 5.0
"""Between two heartbeats of a registered trainer."""
ALIVE_S = 15.0
"""A trainer that was heard of within so many seconds is not taken over from, unless that is insisted on."""


class NotTrained(StrEnum):
    """Why no lease brings a trial's tokens to a trainer: words of the ledger. Of several, the first that holds."""

    EVALUATION = "evaluation"  # the group's purpose is eval
    UNGROUPED = "ungrouped"  # the trial is in no group
    LATE = "late"  # it had not ended when its group was served; or these tokens came after it had been accounted for
    DELETED = "deleted"  # the session was deleted before its group was first leased
    ABORTED = "aborted"  # the trial was given up
    TEXT_ONLY = "text_only"  # an upstream gave text and no token ids, for some of its turns at least
    SYNTHETIC = "synthetic"  # a script spoke
    UNSCORED = "unscored"  # it ended without a reward


class LeaseRequest(BaseModel):
    """`POST /leases`. Answers at once when `max_groups` are ready, else after `wait_s` with what there is.

    run_id: groups of this run only (None: of groups without one). consumer: names the trainer, for operators.
    ttl_s: how long it may take from here to acknowledge or extend.
    request_id: the same again within five minutes is answered with the same leases, if they are still held: for a caller whose
        answer was lost.
    max_groups: 0: nothing new is leased; the answer has what a request of this `request_id` was granted before.
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str | None = Field(None, max_length=128)
    consumer: str = Field(pattern=CONSUMER)
    max_groups: int = Field(1, ge=0, le=MOST_LEASES)
    wait_s: float = Field(0.0, ge=0, le=60, allow_inf_nan=False)
    ttl_s: float = Field(600.0, ge=1, le=86400, allow_inf_nan=False)
    request_id: str | None = Field(None, pattern=REQUEST_ID)


class Lease(BaseModel):
    """One group, held by one trainer.

    trials: those to be trained: completed, with a reward, with exact records. left_out: trial_id -> why it is not among them
    (`unscored`, `aborted`, `text_only`, `synthetic`, `deleted`, `late`: had not ended at the deadline), words of the ledger.
    Samples are read with `GET /sessions/{trial_id}/samples`.
    tokens: trial_id -> policy version -> sampled tokens, for the trainer to account for. Also of trials that were deleted since
        the group was first leased: they are in `tokens` and not in `trials` any more, and the trainer books them as `deleted`
        (as it does where reading samples answers 410 or 404), unless its ledger has the group already.
    grants: how often the group has been leased, this time included.
    """

    model_config = ConfigDict(extra="forbid")
    lease_id: str
    group: Group
    trials: list[Session]
    left_out: dict[str, str] = Field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = Field(default_factory=dict)
    expires_at: float
    grants: int = 1


class LeaseList(BaseModel):
    """Oldest ready group first."""

    items: list[Lease]


class LeaseExtension(BaseModel):
    """`POST /leases/{lease_id}/extend`.

    used: the trainer is done with the group, and that is not durable yet. It is not in hand any more: whoever bounds staleness
        may start another group, and the trainer need not write a checkpoint after each step for that.
    """

    model_config = ConfigDict(extra="forbid")
    ttl_s: float = Field(600.0, ge=1, le=86400, allow_inf_nan=False)
    used: bool = False


class LeaseTerm(BaseModel):
    """What is left of a lease. expires_at: None once it is acknowledged or released."""

    model_config = ConfigDict(extra="forbid")
    lease_id: str
    expires_at: float | None = None


class TakeOver(BaseModel):
    """`POST /runs/{run_id}/trainer`. The same `trainer` again, while it has the run, changes nothing.

    trainer: names this start of a trainer, and no other. take_over: also from a trainer that was heard of in the last 15 s.
    """

    model_config = ConfigDict(extra="forbid")
    trainer: str = Field(pattern=CONSUMER)
    take_over: bool = False


class TrainerHeartbeat(BaseModel):
    """`POST /runs/{run_id}/trainer/heartbeat`, every 5 s. leaving: this trainer ends; the next one need not wait."""

    model_config = ConfigDict(extra="forbid")
    trainer: str = Field(pattern=CONSUMER)
    epoch: int = Field(ge=1, le=2**53)
    leaving: bool = False


class Tenure(BaseModel):
    """That a trainer has a run. epoch: counts the trainers that have had it, from 1. All that this trainer asks of leases and
    policy updates carries it, in the header `steno-epoch`; under an older epoch it gets 409 `superseded`."""

    model_config = ConfigDict(extra="forbid")
    run_id: str | None
    trainer: str
    epoch: int


class RolloutsOver(BaseModel):
    """`POST /runs/{run_id}/rollouts`: no more training groups come, as far as whoever rolls out knows. A group that is
    registered afterwards takes it back, and so does `over: false`."""

    model_config = ConfigDict(extra="forbid")
    over: bool = True


class RunGroups(BaseModel):
    """How many of a run's training groups are where. A group is in hand from registration until it is acknowledged, or used: a
    worker serves weights that were trained on it, or there was nothing to train."""

    model_config = ConfigDict(extra="forbid")
    running: int = 0
    ready: int = 0
    leased: int = 0
    used: int = Field(
        0,
        description="leased; a worker serves weights trained on them, or there was nothing to train; not durable yet: others may "
        "be started in their place",
    )
    acknowledged: int = 0
    empty: int = Field(0, description="ended without a single trial to train; never leased")

    @property
    def in_hand(self) -> int:
        return self.running + self.ready + self.leased


class EvalGroups(BaseModel):
    """How many of a run's evaluation groups have not ended yet, and have. They are never leased."""

    model_config = ConfigDict(extra="forbid")
    running: int = 0
    ended: int = 0


class RunTrainer(BaseModel):
    """Who registered as a run's trainer last. heard_s: seconds since its last heartbeat; None: it has left."""

    model_config = ConfigDict(extra="forbid")
    name: str
    epoch: int
    heard_s: float | None = None

    @property
    def alive(self) -> bool:
        return self.heard_s is not None and self.heard_s <= ALIVE_S


def run_trainer(name: str, epoch: int, heard_at: float, now: float) -> RunTrainer | None:
    """The trainer; None: none has registered. Args: as stores keep them: epoch 0: none has registered; heard_at 0.0: it left."""
    if not epoch:
        return None
    return RunTrainer(name=name, epoch=epoch, heard_s=max(0.0, now - heard_at) if heard_at else None)


class RunView(BaseModel):
    """`GET /runs/{run_id}`.

    sampled: tokens of the run's ended trials, per policy version. borrowed: the same of trials that score another run's anew
    (`Session.rescore_of`): sampled there. not_trained: of both, the tokens that no lease will ever bring to a trainer, per reason
    of the ledger, per version. The rest is what trainers account for (I4): what the leases of acknowledged, leased and ready
    groups bring, and what the ended trials of running groups hold. trainer: None: none has registered (a trainer of another kind
    may lease without); also from a proxy of an older version.
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str | None
    groups: RunGroups = Field(default_factory=RunGroups)
    eval_groups: EvalGroups = Field(default_factory=EvalGroups)
    sampled: dict[str, int] = Field(default_factory=dict)
    borrowed: dict[str, int] = Field(default_factory=dict)
    not_trained: dict[str, dict[str, int]] = Field(default_factory=dict)
    rollouts_over: bool = Field(False, description="the launcher has said that no more training groups come")
    trainer: RunTrainer | None = None

    @property
    def known(self) -> bool:
        """Whether anything is on record of the run."""
        counts = [*self.groups.model_dump().values(), *self.eval_groups.model_dump().values()]
        return bool(self.sampled or self.borrowed or self.trainer or any(counts))

    @property
    def to_account_for(self) -> dict[str, int]:
        """Tokens sampled and borrowed, per policy version: what was trained, or not, adds up to these."""
        return {
            version: self.sampled.get(version, 0) + self.borrowed.get(version, 0)
            for version in (self.sampled | self.borrowed)
        }

    @property
    def trained(self) -> bool:
        """Whether somebody takes, or has taken, the run's groups."""
        taken = self.groups.leased + self.groups.used + self.groups.acknowledged
        return bool(taken or (self.trainer and self.trainer.alive))


class RunSummary(BaseModel):
    """A run in a list. last_group_at: when its newest group was made, Unix seconds."""

    model_config = ConfigDict(extra="forbid")
    run_id: str | None
    last_group_at: float
    groups: RunGroups = Field(default_factory=RunGroups)
    eval_groups: EvalGroups = Field(default_factory=EvalGroups)


class RunList(BaseModel):
    """`GET /runs`. Newest first."""

    items: list[RunSummary]


class GroupPlace(BaseModel):
    """A group in a list. state: as counted in `RunGroups`; `over`: an evaluation that has ended. ended: how many of its trials
    have. trainer: who holds its lease. created_at: Unix seconds; None: made by a proxy of an older version. archived: all of its
    trials are in the archive; the state is that in which it was."""

    model_config = ConfigDict(extra="forbid")
    group_id: str
    purpose: str
    state: str
    size: int
    ended: int
    grants: int
    trainer: str | None = None
    created_at: float | None = None
    archived: bool = False


class GroupList(BaseModel):
    """`GET /groups`. Newest first."""

    items: list[GroupPlace]


def newest_groups(found: Iterable[GroupPlace]) -> list[GroupPlace]:
    return sorted(found, key=lambda place: (place.created_at or 0.0, place.group_id), reverse=True)


class LeaseName(NamedTuple):
    """What a lease_id says: where the group is kept, and the grant's fencing token, which begins with the epoch of a registered
    trainer (`3.…`). Opaque to callers."""

    run_id: str | None
    group_id: str
    grant: str

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(tuple(self))).decode().rstrip("=")

    @property
    def epoch(self) -> int | None:
        """None: its trainer never registered."""
        epoch, dot, _ = self.grant.partition(".")
        return int(epoch) if dot and epoch.isdecimal() else None

    @classmethod
    def decode(cls, lease_id: str) -> LeaseName:
        """Raises: NotFound: no lease_id of ours."""
        try:
            raw = base64.b64decode(lease_id + "=" * (-len(lease_id) % 4), altchars=b"-_", validate=True)
            return cls(*msgspec.msgpack.decode(raw, type=tuple[str | None, str, str]))
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise NotFound(f"no lease {lease_id[:128]!r}") from None
