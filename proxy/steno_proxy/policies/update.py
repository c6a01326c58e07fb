"""One update as a state machine: facts about workers in, frames to send out. No sockets, no clock: time is an argument.

    staging --all awaited are ready, or the deadline--> applied --each serves it or is named as failed--> done | failed
       \\----------------------- a newer update of the policy was posted ----------------------------> superseded

Every replica runs it for the workers it sees; what it tells them is idempotent. Workers that come later, and those that failed,
are brought along after `done` as well: they are told to load as soon as they are ready. A `failed` update rests until it is
posted again. If a worker is found to serve it, it is `done` after all.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from steno.contracts.errors import ProtocolError
from steno.contracts.policy import Update, UpdateSpec, Want, WorkerUpdate
from steno.contracts.wire.frames import Progress
from steno_proxy.policies.member import RESEND_S, ShardCursor, UpdateMember

LOADING_S = 60.0
"""Seconds that a worker has at least for loading, even if the deadline is nearer."""
MAX_CREDIT_BYTES = 32 * 2**20
"""The most of a worker's credit that is used before its next Progress; bounds what this proxy holds for it (`stream`)."""
MISSED = "missed: sent over nccl without this worker, which gets the next version"
STATES = frozenset({"waiting", "receiving", "ready", "loading", "served", "failed"})


class FrameKind(Enum):
    """Which frame of an update a worker is sent."""

    PREPARE = "prepare"
    APPLY = "apply"
    ABANDON = "abandon"


class MemberFrame(NamedTuple):
    """A frame of an update that one worker is to be sent."""

    worker_id: str
    do: FrameKind


class UpdateRun:
    """One update of a policy: takes facts about workers, and says which frames they are to be sent.

    Args:
    number: in the order of posting within the policy.
    created_at, since, ended_at: when it was posted, when its deadline began to run, when it ended; in Unix seconds, which
        replicas share. All other times are seconds of the monotonic clock that `now` comes from.
    unix_ahead_s: how far Unix time was ahead of `now` when the update was heard of; so much that `since` is not in the future.
    settle_until: workers that come until then are awaited; those of a proxy that has just started are still dialling.
    state: `running`, or how it ended already: then it only brings others along.
    """

    def __init__(
        self, update_id: str, spec: UpdateSpec, *, number: int, created_at: float, since: float, settle_until: float,
        state: str = "running", ended_at: float | None = None, unix_ahead_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.update_id = update_id
        self.spec = spec
        self.version = spec.version
        self.number = number
        self.created_at = created_at
        self.since = since
        self.state = state
        self.ended_at = ended_at
        self.unix_ahead_s = unix_ahead_s
        self.noted = state  # the state that `keeper.py` has last logged and counted
        self.stored = ""  # the state in which the store was told that it has ended
        self.applied = state != "running"
        self.served = state == "done"  # by some worker, at some time
        self.members: dict[str, UpdateMember] = {}
        files = spec.manifest.files
        self.sizes = {file.name: file.size for file in files}
        self._order = {file.name: place for place, file in enumerate(files)}
        self._settle_until = settle_until
        self._now = 0.0
        self._steps: list[MemberFrame] = []

    # -- facts; each returns what is to be sent because of it

    def join(self, worker_id: str, version: str, now: float) -> list[MemberFrame]:
        """A worker of this policy is there, new or started again. version: what it serves, "" if that is not to be trusted."""
        before = self.members.get(worker_id)
        awaited = before.awaited if before is not None else now <= self._settle_until
        member = self.members[worker_id] = UpdateMember(worker_id, awaited and not self.applied)
        if before is not None:
            member.attempts = before.attempts
        if version == self.version:
            self._serve(member)
        elif self.state in ("running", "done"):
            self._ask(member, now)
        return self._advance(now)

    def announced(self, worker_id: str, version: str, now: float) -> list[MemberFrame]:
        """A worker says which version it serves now, which may be the same as before."""
        member = self.members.get(worker_id)
        if member is None or (member.state == "served" and version != self.version):
            return self.join(worker_id, version, now)
        if version == self.version:
            self._serve(member)
        return self._advance(now)

    def leave(self, worker_id: str, now: float) -> list[MemberFrame]:
        """Its channel is over."""
        member = self.members.get(worker_id)
        if member is not None and self.ended:
            del self.members[worker_id]  # nobody waits for it; if it comes back it begins anew
        elif member is not None:
            member.fail("worker_lost: the worker went away", now, lost=True)
        return self._advance(now)

    def progress(self, worker_id: str, said: Progress, now: float) -> list[MemberFrame]:
        """Raises ProtocolError: a state, a time or a place in the weights that can't be."""
        member = self.members.get(worker_id)
        if not (0 <= said.pause_s < math.inf and 0 <= said.load_s < math.inf):
            raise ProtocolError("Progress: pause_s and load_s must be finite and not negative")
        if said.state not in STATES:
            raise ProtocolError(f"Progress: unknown state: {said.state[:40]!r}")
        if member is None or (self.state == "superseded" and said.state in ("waiting", "receiving", "ready")):
            return []
        if said.received >= 0 and (said.received or said.state == "receiving"):
            member.received = said.received  # others need not say it again
        if said.state == "failed":
            member.fail(f"{said.code or 'failed'}: {said.message}"[:2000], now)
        elif said.state == "served":
            self._serve(member)
            member.pause_s, member.load_s = said.pause_s, said.load_s
        elif member.state != "served":
            member.state, member.error, member.lost, member.retry_at = said.state, None, False, None  # type: ignore[assignment]
            if said.state == "receiving":
                self._receiving(member, said, now)
            elif said.state == "loading":
                member.applied_at = member.applied_at or now
            elif said.state == "ready" and self.applied:
                self._apply(member, now)
        return self._advance(now)

    def tick(self, now: float) -> list[MemberFrame]:
        """What is due at `now`; safe to call at any time."""
        for member in self.members.values():
            if member.cursor is not None:
                member.cursor.rewind(now)
            if member.retry_at is not None and now >= member.retry_at and self.state in ("running", "done"):
                self._ask(member, now)
        return self._advance(now)

    def supersede(self, now: float) -> list[MemberFrame]:
        """A newer update has been posted. Workers that load go on; those that wait, receive or are ready abandon this one."""
        if self.state == "superseded":
            return []
        for member in self.members.values():
            if member.state in ("waiting", "receiving", "ready"):
                self._steps.append(MemberFrame(member.worker_id, FrameKind.ABANDON))
            member.cursor = None
        self.state, self.ended_at = "superseded", self._unix(now) if self.ended_at is None else self.ended_at
        return self._taken()

    def revive(self, since: float, now: float) -> list[MemberFrame]:
        """It had failed and was posted again: everybody is asked again, and the deadline begins anew."""
        self.state, self.ended_at, self.since, self.applied = "running", None, since, False
        self.members = {name: member for name, member in self.members.items() if not member.lost}
        for member in self.members.values():
            if member.state != "served":
                member.state, member.attempts, member.retry_at, member.awaited = "waiting", 0, None, True
                self._steps.append(MemberFrame(member.worker_id, FrameKind.PREPARE))
        return self._advance(now)

    # -- what it has come to

    @cached_property
    def spec_json(self) -> bytes:
        """As Prepare takes it; megabytes for models of many tensors, so it is made once."""
        return self.spec.model_dump_json().encode()

    def bring_along(self) -> None:
        """Make this the update that workers are brought to again: a newer one failed. Each worker must then `join` it anew."""
        self.members.clear()
        self.state, self.applied = "done", True

    @property
    def ended(self) -> bool:
        return self.state != "running"

    def switching(self, worker_id: str) -> bool:
        """Whether it was told to load together with the others: its turns go on under the new version within moments."""
        member = self.members.get(worker_id)
        return member is not None and member.state == "loading" and member.awaited

    def next_deadline(self) -> float | None:
        due = [member.retry_at for member in self.members.values() if member.retry_at is not None]
        if self.state not in ("running", "done"):
            due = []
        for member in self.members.values():
            if member.cursor is not None and member.cursor.unconfirmed:
                due.append(member.cursor.moved_at + RESEND_S)
            if member.state == "loading" and self.state in ("running", "done"):
                due.append(self._load_until(member))
        if self.state == "running":
            due += [at for at in (self._deadline, self._settle_until) if at > self._now]
        return min(due) if due else None

    def wants(self) -> list[Want]:
        """The next byte to upload for each worker that lacks some and has room for it, in the shards' order, each place once."""
        places = set()
        for member in self.members.values():
            cursor = member.cursor
            if cursor is not None and cursor.room(self.sizes[cursor.shard]):
                places.add((self._order[cursor.shard], cursor.sent, cursor.shard))
        return [Want(shard=shard, offset=offset) for _, offset, shard in sorted(places)]

    def view(self) -> Update:
        workers = [
            WorkerUpdate(
                worker_id=member.worker_id, state=member.state, received=member.received, pause_s=member.pause_s,
                load_s=member.load_s, error=member.error,
            )
            for _, member in sorted(self.members.items())
        ]  # fmt: skip
        return Update(
            update_id=self.update_id, version=self.version, policy=self.spec.policy, transport=self.spec.transport,
            state=self.state, workers=workers, wants=self.wants(), created_at=self.created_at, ended_at=self.ended_at,
        )  # fmt: skip

    # -- decisions

    @property
    def _deadline(self) -> float:
        return self.since - self.unix_ahead_s + self.spec.deadline_s

    def _unix(self, now: float) -> float:
        return now + self.unix_ahead_s

    def _serve(self, member: UpdateMember) -> None:
        self.served = True
        member.serve()

    def _ask(self, member: UpdateMember, now: float) -> None:
        if self.spec.transport == "nccl" and self.applied:
            # With nccl, all workers receive together. The others have begun without this one, so it would wait for ever.
            member.fail(f"{MISSED}: {member.error}" if member.error else MISSED, now)
            member.retry_at = None
            return
        member.state, member.retry_at = "waiting", None
        self._steps.append(MemberFrame(member.worker_id, FrameKind.PREPARE))

    def _receiving(self, member: UpdateMember, said: Progress, now: float) -> None:
        if self.spec.transport != "stream":
            return
        size = self.sizes.get(said.shard)
        if size is None or not 0 <= said.offset <= size or said.credit < 0:
            raise ProtocolError("Progress: wants bytes beyond the update's shards")
        credit = min(said.credit, MAX_CREDIT_BYTES)
        if member.cursor is not None and member.cursor.shard == said.shard:
            member.cursor.report(said.offset, credit, now)
        else:
            member.cursor = ShardCursor(said.shard, said.offset, said.offset, said.offset + credit, now)

    def _apply(self, member: UpdateMember, now: float) -> None:
        member.state, member.applied_at, member.cursor = "loading", now, None
        self._steps.append(MemberFrame(member.worker_id, FrameKind.APPLY))

    def _load_until(self, member: UpdateMember) -> float:
        # Nothing waits for a worker that is brought along after `done`: it has as long as the others had.
        least = max(LOADING_S, self.spec.deadline_s) if self.state == "done" else LOADING_S
        return max(self._deadline, member.applied_at + least)

    def _advance(self, now: float) -> list[MemberFrame]:
        """Go on to whatever the facts now allow."""
        self._now = max(self._now, now)
        members = list(self.members.values())
        for member in members:
            if member.state not in ("receiving", "failed"):
                member.cursor = None
            if member.state == "loading" and now >= self._load_until(member):
                member.fail("deadline: not loaded in time", now)
        if self.state == "running":
            late = now >= self._deadline
            if late:
                self._name_late(members, now)
            if not self.applied:
                self._go(members, late, now)
            self._end(members, late, now)
        elif self.state == "failed" and self.served:
            self.state, self.ended_at, self.applied = "done", self._unix(now), True
            # Those that came while it rested were not asked, and those that got ready were not told to load.
            for member in members:
                if member.state in ("waiting", "ready"):
                    self._ask(member, now)
        return self._taken()

    def _name_late(self, members: list[UpdateMember], now: float) -> None:
        for member in members:
            if not member.settled and member.state in ("waiting", "receiving"):
                cursor = member.cursor
                member.fail("deadline: not received in time", now)
                member.cursor = cursor  # it goes on receiving, and loads when it is ready

    def _go(self, members: list[UpdateMember], late: bool, now: float) -> None:
        """Tell all ready workers to load, if none is to be waited for or the deadline has passed."""
        waited = [member for member in members if member.awaited and member.state in ("waiting", "receiving")]
        ready = [member for member in members if member.state == "ready"]
        if late or (ready and not waited and now >= self._settle_until):
            self.applied = True
            for member in ready:
                self._apply(member, now)

    def _end(self, members: list[UpdateMember], late: bool, now: float) -> None:
        """End the update if every worker is settled. If all of them have gone away, wait for them until the deadline."""
        settling = now < self._settle_until and not late
        if settling or not all(member.settled for member in members):
            return
        if self.served:
            self.state, self.ended_at, self.applied = "done", self._unix(now), True
        elif late or any(member.attempts for member in members):
            self.state, self.ended_at = "failed", self._unix(now)

    def _taken(self) -> list[MemberFrame]:
        steps, self._steps = self._steps, []
        return steps
