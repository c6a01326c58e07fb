"""What a run keeps of its groups, trials, leases and tokens (I4). What may become of them, `decisions.py` and `leasing.py` say.

A store that holds only parts of a run (Redis) gives a `RunAccount` of its own, which reads like a whole one. Times are Unix
seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct

from steno.contracts.records import Group
from steno_proxy.store.runs.settlement import Tokens

REQUEST_TTL_S = 300.0
"""How long a request for leases is remembered, for the caller whose answer was lost: longer than any client goes on asking."""
TAKEN_S = 3600.0
"""How long `taken` keeps an entry after its time: longer than any call may take that could report the same tokens again."""
NOT_SETTLED = float("inf")
"""The time of an entry of `taken` while the trial's own record does not say yet that its tokens are booked."""


class GroupState(StrEnum):
    """The state of a group, as `GroupPlace` names it."""

    RUNNING = "running"
    READY = "ready"
    LEASED = "leased"
    ACKNOWLEDGED = "acknowledged"
    EMPTY = "empty"
    OVER = "over"


class TrialAccount(
    Struct, frozen=True, kw_only=True, rename={"life": "l", "outcome": "o", "final": "f", "tokens": "k"}
):
    """A trial that has ended, as its run keeps it. final: 0 or 1. other: what only other releases know. The letters of both
    records are those of docs/recording-format.md."""

    life: str
    outcome: str
    final: int
    tokens: Tokens
    other: dict[str, Any] = {}


class RegisteredTrainer(NamedTuple):
    """Who has the run, if a trainer has ever registered. epoch: 0: none has. heard_at: 0.0: it has left."""

    name: str = ""
    epoch: int = 0
    heard_at: float = 0.0


_LETTERS = {
    "state": "s", "purpose": "p", "size": "n", "final": "f", "order": "o", "ready_at": "y", "grants": "g", "consumer": "c",
    "granted_at": "t", "expires_at": "x", "granted": "l", "let_go": "r", "settled": "a", "forsaken": "z", "used": "u",
    "made_at": "m",
}  # fmt: skip


class GroupStatus(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=_LETTERS):
    """How a group of a run stands.

    size, final: its trials, and those whose outcome is final. order: of getting ready (`in_order`); the store gives it.
    grants: how often it was leased. granted, let_go, settled: the grant that holds it, the last that was released, the one
    that was acknowledged. forsaken: 1: its sessions are gone. used: by a step that is not durable yet. made_at: None: older
    releases did not say.
    """

    state: GroupState
    purpose: str
    size: int
    final: int
    grants: int
    order: str = ""
    ready_at: float | None = None
    consumer: str = ""
    granted_at: float | None = None
    expires_at: float | None = None
    granted: str = ""
    let_go: str = ""
    settled: str = ""
    forsaken: int = 0
    used: bool = False
    made_at: float | None = None
    other: dict[str, Any] = {}

    @property
    def queued(self) -> bool:
        """Whether it waits for a lease, or is leased."""
        return self.state in (GroupState.READY, GroupState.LEASED)

    def expired(self, now: float) -> bool:
        return self.state is GroupState.LEASED and (self.expires_at or 0.0) <= now

    def waits(self, now: float) -> bool:
        return self.state is GroupState.READY or self.expired(now)

    def held_by(self, grant: str) -> bool:
        return self.state is GroupState.LEASED and self.granted == grant


class RunAccount:
    """What a run knows of its groups, trials and tokens; a store may have a subclass that knows only parts. Values are replaced,
    never changed in place.

    records: group -> what was registered. trials: those that have ended. taken: what was counted -> when the trial's own record
    said so (NOT_SETTLED: not yet), or when late tokens were counted. requests: for leases, by id -> the groups and grants that
    answered it. past: groups that are in the archive.
    trainers: "" -> the trainer that has the run. totals: groups by purpose and state. ledger: `s:VERSION` -> tokens sampled,
    `b:VERSION` -> borrowed, `n:REASON:VERSION` -> tokens not trained. over: whether no more training groups come; None: as
    before.
    """

    def __init__(self) -> None:
        self.groups: MutableMapping[str, GroupStatus] = {}
        self.records: MutableMapping[str, Group] = {}
        self.trials: MutableMapping[str, TrialAccount] = {}
        self.taken: MutableMapping[str, float] = {}
        self.requests: MutableMapping[str, list[tuple[str, str]]] = {}
        self.past: MutableMapping[str, GroupStatus] = {}
        self.trainers: MutableMapping[str, RegisteredTrainer] = {}
        self.totals: Counter[str] = Counter()
        self.ledger: Counter[str] = Counter()
        self.over: bool | None = None
        self._ordered = 0

    @property
    def trainer(self) -> RegisteredTrainer:
        """The one that has the run."""
        return self.trainers.get("", RegisteredTrainer())

    def _due_at(self, name: str) -> float | None:
        if self.groups[name].state is not GroupState.RUNNING:
            return None
        group = self.records[name]
        return None if group.deadline_s is None else group.created_at + group.deadline_s

    def due(self, now: float) -> list[str]:
        """Running groups that are past their deadline."""
        return [name for name in self.groups if (at := self._due_at(name)) is not None and at <= now]

    def waiting(self, now: float) -> Iterator[str]:
        """Groups that can be leased, oldest ready first."""
        found = [name for name, status in self.groups.items() if status.waits(now)]
        return iter(sorted(found, key=lambda name: in_order(self.groups[name])))

    def leased(self) -> list[str]:
        """Groups that are leased, also those of which the time is over."""
        return [name for name, status in self.groups.items() if status.state is GroupState.LEASED]

    def next_at(self, now: float) -> float | None:
        """When something may get ready by itself: a deadline, or the end of a lease. None: nothing is known to."""
        times = [*map(self._due_at, self.groups), *(self.groups[name].expires_at for name in self.leased())]
        return min((at for at in times if at is not None), default=None)

    def next_order(self) -> str:
        """Of a group that gets ready; "": the store gives it when it writes."""
        self._ordered += 1
        return str(self._ordered)

    def whole(self, names: Sequence[str]) -> None:
        """Announce the groups whose records and trials are looked at next: a store that knows only parts reads them first."""

    def book(self, tokens: Tokens, reason: str | None = None, *, borrowed: bool = False) -> None:
        """Add tokens to the ledger: as sampled, or borrowed; with a reason, as not trained."""
        side = ("b" if borrowed else "s") if reason is None else f"n:{reason}"
        for version, count in tokens.items():
            self.ledger[f"{side}:{version}"] += count


def in_order(status: GroupStatus | None) -> tuple[int, ...]:
    """The sort key of groups by when they got ready: `order` is some numbers with hyphens between. What has none yet is
    newest."""
    return tuple(map(int, status.order.split("-"))) if status is not None and status.order else (1 << 64,)
