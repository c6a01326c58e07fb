"""Completed groups on their way to a trainer: bodies of `/leases` and `/runs`.

A group is ready when all its trials have ended, or at its deadline with those that have. It is leased to one trainer at a time,
and acknowledged once the step that used it is durable. A lease that is neither acknowledged nor extended in time is served again,
under a new lease_id; a trainer that finds a group in its checkpoint's ledger acknowledges it and trains nothing.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from proxy.contracts.records import Group, Session

CONSUMER = r"^[A-Za-z0-9._-]{1,128}$"


class LeaseRequest(BaseModel):
    """`POST /leases`. Answers at once when `max_groups` are ready, else after `wait_s` with what there is.

    run_id: groups of this run only (None: of groups without one). consumer: names the trainer, for operators.
    ttl_s: how long it may take from here to acknowledge or extend.
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str | None = Field(None, max_length=128)
    consumer: str = Field(pattern=CONSUMER)
    max_groups: int = Field(1, ge=1, le=256)
    wait_s: float = Field(0.0, ge=0, le=60, allow_inf_nan=False)
    ttl_s: float = Field(600.0, ge=1, le=86400, allow_inf_nan=False)


class Lease(BaseModel):
    """One group, held by one trainer.

    trials: those to be trained: completed, with a reward, with exact records. left_out: trial_id -> why it is not among them
    (`unscored`, `aborted`, `text_only`, `synthetic`, `deleted`, `late`: had not ended at the deadline), words of the ledger.
    Samples are read with `GET /sessions/{trial_id}/samples`. grants: how often the group has been leased, this time included.
    """

    model_config = ConfigDict(extra="forbid")
    lease_id: str
    group: Group
    trials: list[Session]
    left_out: dict[str, str] = Field(default_factory=dict)
    expires_at: float
    grants: int = 1


class LeaseList(BaseModel):
    """Oldest ready group first."""

    items: list[Lease]


class LeaseExtension(BaseModel):
    """`POST /leases/{lease_id}/extend`."""

    model_config = ConfigDict(extra="forbid")
    ttl_s: float = Field(600.0, ge=1, le=86400, allow_inf_nan=False)


class RunGroups(BaseModel):
    """How many of a run's training groups are where. A group is in hand from registration until it is acknowledged."""

    model_config = ConfigDict(extra="forbid")
    running: int = 0
    ready: int = 0
    leased: int = 0
    acknowledged: int = 0
    empty: int = Field(0, description="ended without a single trial to train; never leased")

    @property
    def in_hand(self) -> int:
        return self.running + self.ready + self.leased


class RunView(BaseModel):
    """`GET /runs/{run_id}`.

    sampled: tokens of the run's ended trials, per policy version. not_trained: the tokens of those that no lease will bring to a
    trainer, per reason of the ledger, per version. The rest is what trainers account for (I4).
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str
    groups: RunGroups = Field(default_factory=RunGroups)
    eval_groups: RunGroups = Field(default_factory=RunGroups)
    sampled: dict[str, int] = Field(default_factory=dict)
    not_trained: dict[str, dict[str, int]] = Field(default_factory=dict)
