"""What the proxy remembers of policies, and the store of it that lives in this process.

Of each policy: its updates in the order in which they were posted, the newest of them, and the newest that some worker serves,
which is the version in force (I10). `redis/policies.py` keeps the same promises; one suite tests both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.policy import UpdateSpec

SUPERSEDED_TTL_S = 3600
"""How long an update that nobody needs any more can be asked about. Versions and their digests are kept for good."""
LATER_S = 0.001
"""By how much `since` grows at least when an update runs again."""


class UpdateRow(msgspec.Struct, frozen=True):
    """An update on record. Times are Unix seconds.

    number: in the order of posting, from 1, within its policy. spec: an `UpdateSpec` as JSON.
    since: when its deadline began to run: at its posting, and again when it had failed and was posted again. It only grows, as
        replicas know by it that it runs again: where a clock has gone back, or is ahead, it is not the time.
    state: as in `Update`; an update that is not `running` has an `ended_at`.
    """

    update_id: str
    policy: str
    version: str
    number: int
    spec: bytes
    created_at: float
    since: float
    state: str = "running"
    ended_at: float | None = None


class PolicyHead(msgspec.Struct, frozen=True):
    """One policy. posted, since: the newest update, and its row's `since`. served: the newest that a worker serves, or ""."""

    policy: str
    posted: str
    since: float
    served: str = ""


class PolicyStore(Protocol):
    """What is remembered of policies and their updates. Every method is atomic. Raises StoreUnavailable, and what it says."""

    async def post(self, spec: UpdateSpec, *, now: float) -> UpdateRow:
        """Make this the newest update of its policy. The same spec again changes nothing, unless it is the newest and has failed:
        then it runs again.

        Raises: Conflict: a known version with another digest, or one that is not the newest any more.
        """
        ...

    async def heads(self) -> list[PolicyHead]: ...
    async def update(self, update_id: str) -> UpdateRow:
        """As durable as what `post` returned. Raises NotFound: never posted, or superseded long ago."""
        ...

    async def serve(self, update_id: str) -> None:
        """Some worker serves it. Nothing happens where a newer one is served already, or the update is forgotten."""
        ...

    async def end(self, update_id: str, state: str, *, now: float) -> None:
        """`done` or `failed`. Of an update that has ended only one thing can change: a failed one may be done after all."""
        ...

    async def names(self) -> dict[str, str]:
        """The kept names of models, each with its policy; "" if only an older release, which keeps no policies, noted it."""
        ...

    async def keep_names(self, names: Mapping[str, str]) -> None:
        """Keep these too, until they are retired, and of each the policy that was told last. Idempotent."""
        ...

    async def retire_name(self, name: str) -> bool:
        """Keep it no longer. Returns: whether it was kept."""
        ...


class MemoryPolicies:
    """Keeps the `PolicyStore` protocol, in this process only."""

    def __init__(self) -> None:
        self._rows: dict[str, UpdateRow] = {}
        self._heads: dict[str, PolicyHead] = {}
        self._versions: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}
        self._stale: dict[str, float] = {}  # update_id -> when it was superseded
        self._names: dict[str, str] = {}

    async def post(self, spec: UpdateSpec, *, now: float) -> UpdateRow:
        update_id, policy, digest = spec.update_id, spec.policy, spec.manifest.digest
        for stale in [stale for stale, at in self._stale.items() if at + SUPERSEDED_TTL_S <= now]:
            del self._rows[stale], self._stale[stale]
        row = self._rows.get(update_id)
        head = self._heads.get(policy)
        if row is not None:
            if row.state == "failed":
                since = max(now, row.since + LATER_S)
                row = msgspec.structs.replace(row, state="running", since=since, ended_at=None)
                self._rows[update_id] = row
                self._heads[policy] = msgspec.structs.replace(self._heads[policy], since=since)
            return row
        known = self._versions.get((policy, spec.version))
        newest = self._rows[head.posted] if head else None
        if known is not None and known != digest:
            raise other_digest(spec)
        if known is not None and newest is not None and newest.version != spec.version:
            raise not_newest(spec)
        self._versions[policy, spec.version] = digest
        number = self._numbers[policy] = self._numbers.get(policy, 0) + 1
        row = UpdateRow(update_id, policy, spec.version, number, spec.model_dump_json().encode(), now, now)
        self._rows[update_id] = row
        served = head.served if head else ""
        if newest is not None:
            self._rows[newest.update_id] = superseded(newest, now)
            if newest.update_id != served:
                self._stale[newest.update_id] = now
        self._heads[policy] = PolicyHead(policy, update_id, now, served)
        return row

    async def heads(self) -> list[PolicyHead]:
        return list(self._heads.values())

    async def update(self, update_id: str) -> UpdateRow:
        if update_id not in self._rows:
            raise unknown(update_id)
        return self._rows[update_id]

    async def serve(self, update_id: str) -> None:
        row = self._rows.get(update_id)
        if row is None:
            return
        head = self._heads[row.policy]
        before = self._rows.get(head.served)
        if before is not None:
            if before.number >= row.number:
                return
            self._stale[before.update_id] = row.since
        self._stale.pop(update_id, None)
        self._heads[row.policy] = msgspec.structs.replace(head, served=update_id)

    async def end(self, update_id: str, state: str, *, now: float) -> None:
        row = self._rows.get(update_id)
        if row is not None and (row.state == "running" or (row.state == "failed" and state == "done")):
            self._rows[update_id] = msgspec.structs.replace(row, state=state, ended_at=now)

    async def names(self) -> dict[str, str]:
        return dict(self._names)

    async def keep_names(self, names: Mapping[str, str]) -> None:
        self._names.update(names)

    async def retire_name(self, name: str) -> bool:
        return self._names.pop(name, None) is not None


def superseded(row: UpdateRow, now: float) -> UpdateRow:
    return msgspec.structs.replace(row, state="superseded", ended_at=now if row.ended_at is None else row.ended_at)


def unknown(update_id: str) -> NotFound:
    return NotFound(f"no policy update {update_id[:64]}")


def other_digest(spec: UpdateSpec) -> Conflict:
    return Conflict(f"version {spec.version} of policy {spec.policy} is on record with other weights", field="manifest")


def not_newest(spec: UpdateSpec) -> Conflict:
    return Conflict(f"version {spec.version} of policy {spec.policy} has been superseded", field="step")
