"""Random histories of groups, trials, trainers and time, played on a store, with what must hold of them (I4).

A history is a list of steps. Each has a kind and two numbers, which choose among what exists at that time: so a history does the
same on every store. The model below keeps no states: it remembers what was sampled and what trainers acknowledged, and adds up.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

from hypothesis import strategies as st

from steno.contracts.errors import Conflict, Gone, NotFound, Superseded, TrainerAlive
from steno.contracts.records import TokenSpan
from steno.contracts.runs.leases import Lease
from steno_proxy.store.interface import SessionStore
from tests.support.records.groups import RUN, end, group, lease, speak
from tests.support.records.recordings import session

RETENTION_S = 300.0
KINDS = (
    "group", "group", "finished", "finished", "nearly", "nearly", "alone", "speak", "speak", "complete", "complete", "unsettled",
    "limit", "abort", "settle", "delete", "delete", "late", "expire", "due", "lease", "lease", "lease", "ack", "ack",
    "release", "extend", "wait", "wait", "register", "beat", "leased", "leased",
)  # fmt: skip
"""`finished`, `nearly`: a group of which all trials, or all but one, spoke and were scored: the traps are in what follows."""


class Step(NamedTuple):
    kind: str
    a: int
    b: int


STEPS = st.lists(
    st.builds(Step, st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)), min_size=10, max_size=60
)


def history(seed: int, steps: int = 60) -> list[Step]:
    """A random history: long and evenly mixed, as generators that shrink hardly ever draw one."""
    draw = random.Random(seed)
    return [Step(draw.choice(KINDS), draw.randrange(12), draw.randrange(12)) for _ in range(steps)]


class Play:
    """One history on one store. `seen` is what the store answered, for comparison with another's."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self.now = 100.0
        self.trials: list[str] = []
        self.spoken: Counter[str] = Counter()
        self.turns = 0
        self.groups = 0
        self.leases: list[Lease] = []
        self.trainers = 0  # that have taken over: the newest one's epoch
        self.heard_at = -1e9
        self.epochs: dict[str, int] = {}  # lease_id -> of registered trainers
        self.trained: dict[str, dict[str, dict[str, int]]] = {}
        self.seen: list[Any] = []

    async def run(self, steps: list[Step]) -> None:
        for step in steps:
            await getattr(self, step.kind)(step.a, step.b)
            self.now += 1.0
            view = await self.store.runs.view(RUN, now=self.now)
            self.seen.append(view.model_dump())
        await self._drain()

    def _trial(self, a: int) -> str:
        """One of the newest trials, by `a`: these are mostly still open. "nobody": there is no trial yet."""
        return self.trials[-1 - a % len(self.trials)] if self.trials else "nobody"

    async def group(self, a: int, b: int) -> None:
        name = f"g{self.groups}"
        self.groups += 1
        made = await group(
            self.store, name, 1 + a % 3, created_at=self.now, deadline_s=20.0 * b if b % 3 else None,
            purpose="eval" if a == 11 else "train",
        )  # fmt: skip
        self.trials += made.trial_ids

    async def finished(self, a: int, b: int) -> None:
        await self._finished(a, b, 1 + a % 3)

    async def nearly(self, a: int, b: int) -> None:
        await self._finished(a, b, a % 3)

    async def _finished(self, a: int, b: int, scored: int) -> None:
        name = f"g{self.groups}"
        await self.group(a, b)
        for number in range(1 + a % 3):
            await self._speak(f"{name}.{number}", 1 + b)
            if number < scored:
                await self._end(f"{name}.{number}", float(b))

    async def alone(self, a: int, b: int) -> None:
        name = f"alone{len(self.trials)}"
        await self.store.register(session(name, run_id=RUN, created_at=self.now))
        self.trials.append(name)

    async def speak(self, a: int, b: int) -> None:
        await self._speak(self._trial(a), b + 1)

    async def late(self, a: int, b: int) -> None:
        """A turn that another replica was in the middle of."""
        await self._speak(self._trial(a), b + 1, partial=True, finish_reason="cancelled")

    async def _speak(self, trial_id: str, tokens: int, **fields: Any) -> None:
        self.turns += 1
        half = tokens // 2
        versions = {"l/1": half, f"l/{self.turns % 3 + 2}": tokens - half}
        spans, at = [], 0
        for version, count in versions.items():
            if count:
                spans.append(TokenSpan(version=version, start=at, end=at + count))
                at += count
        try:
            await speak(self.store, trial_id, tokens, number=self.turns, versions=spans, **fields)
        except NotFound:
            return
        except Gone:
            if not fields:  # a whole turn is refused and not counted: a proxy would commit it again as partial
                return
        self.spoken.update({version: count for version, count in versions.items() if count})

    async def complete(self, a: int, b: int) -> None:
        await self._end(self._trial(a), None if b == 0 else b / 10)

    async def unsettled(self, a: int, b: int) -> None:
        """Completed by a proxy that died before it could tell the run."""
        try:
            await self.store.complete(
                self._trial(a), status="completed", reward=1.0, end_reason="x", metrics={}, now=self.now
            )
        except (Conflict, Gone, NotFound):
            self.seen.append("refused")

    async def limit(self, a: int, b: int) -> None:
        await self._end(self._trial(a), None, final=False)

    async def abort(self, a: int, b: int) -> None:
        await self._end(self._trial(a), None, status="aborted")

    async def _end(self, trial_id: str, reward: float | None, **fields: Any) -> None:
        try:
            await end(self.store, trial_id, reward, now=self.now, **fields)
        except (Conflict, Gone, NotFound) as error:
            self.seen.append(type(error).__name__)

    async def settle(self, a: int, b: int) -> None:
        await self.store.settle(self._trial(a), now=self.now)

    async def delete(self, a: int, b: int) -> None:
        try:
            await self.store.delete(self._trial(a), now=self.now, tombstone_s=1e6)
        except NotFound:
            self.seen.append("not there")

    async def expire(self, a: int, b: int) -> None:
        self.seen.append(await self.store.expire(now=self.now, retention_s=RETENTION_S))

    async def due(self, a: int, b: int) -> None:
        await self.store.runs.close_due(now=self.now)

    async def register(self, a: int, b: int) -> None:
        """A trainer takes over. The leases of registered trainers end, and their groups can be leased again."""
        alive = self.heard_at + 15.0 > self.now
        try:
            tenure = await self.store.runs.take_over(RUN, f"t{self.trainers + 1}", force=b % 3 == 0, now=self.now)
        except TrainerAlive:
            assert alive and b % 3
            return
        assert not alive or b % 3 == 0
        self.trainers += 1
        assert tenure.epoch == self.trainers
        self.heard_at = self.now
        for one in self.leases:
            if one.lease_id in self.epochs:
                one.expires_at = 0.0

    async def beat(self, a: int, b: int) -> None:
        epoch = self.trainers - (a == 0)
        if epoch < 1:
            return
        try:
            await self.store.runs.heartbeat(RUN, f"t{epoch}", epoch, leaving=b == 0, now=self.now)
        except Superseded:
            assert epoch < self.trainers
            return
        assert epoch == self.trainers
        self.heard_at = -1e9 if b == 0 else self.now

    async def leased(self, a: int, b: int) -> None:
        """By a registered trainer, sometimes by one that was superseded."""
        if (epoch := self.trainers - (b == 0)) >= 1:
            await self._lease(a, b, epoch)

    async def lease(self, a: int, b: int) -> None:
        await self._lease(a, b, None)

    async def _lease(self, a: int, b: int, epoch: int | None) -> None:
        try:
            granted = await lease(self.store, self.now, most=1 + a % 3, ttl_s=10.0 * (1 + b), epoch=epoch)
        except Superseded:
            assert epoch is not None and epoch < self.trainers
            return
        assert epoch in (None, self.trainers)
        for one in granted:
            if epoch is not None:
                self.epochs[one.lease_id] = epoch
            name = one.group.group_id
            assert name not in self.trained, "an acknowledged group was served again"
            held = [old for old in self.leases if old.group.group_id == name and old.expires_at > self.now]
            assert held == [], "a group that is held was served to another trainer"
            assert one.group.purpose == "train"
            before = [old.tokens for old in self.leases if old.group.group_id == name]
            assert all(tokens == one.tokens for tokens in before), "what a lease brings has changed"
            await self._check_record(one)
            self.leases.append(one)
        self.seen.append([one.model_dump(exclude={"lease_id"}) for one in granted])

    async def _check_record(self, one: Lease) -> None:
        """What a trainer reads is what it was told."""
        for found in one.trials:
            read: Counter[str] = Counter()
            for turn in await self.store.turns(found.trial_id):
                read.update({span.version: span.end - span.start for span in turn.versions})
            assert read == one.tokens[found.trial_id]
            assert found.reward is not None and found.status == "completed"

    async def ack(self, a: int, b: int) -> None:
        await self._ack(self.leases[-1 - a % len(self.leases)] if self.leases else None)

    async def _ack(self, one: Lease | None) -> None:
        if one is None:
            return
        try:
            await self.store.runs.acknowledge(one.lease_id, now=self.now)
        except (Conflict, NotFound) as error:  # NotFound: acknowledged, and its sessions are gone since
            self._lost(one, error)
            return
        self._gone(one)
        self.trained[one.group.group_id] = one.tokens

    def _lost(self, one: Lease, error: Exception) -> None:
        assert isinstance(error, Superseded) == (self.epochs.get(one.lease_id, self.trainers) < self.trainers)
        self.seen.append("lost")

    def _gone(self, one: Lease) -> None:
        for old in self.leases:
            if old.lease_id == one.lease_id:
                old.expires_at = 0.0

    async def release(self, a: int, b: int) -> None:
        if not self.leases:
            return
        one = self.leases[-1 - a % len(self.leases)]
        try:
            await self.store.runs.release(one.lease_id, now=self.now)
        except (Conflict, NotFound) as error:  # NotFound: acknowledged, and its sessions are gone since
            self._lost(one, error)
        else:
            self._gone(one)

    async def extend(self, a: int, b: int) -> None:
        if not self.leases:
            return
        one = self.leases[-1 - a % len(self.leases)]
        try:
            one.expires_at = await self.store.runs.extend(one.lease_id, 10.0 * (1 + b), now=self.now)
        except (Conflict, NotFound) as error:  # NotFound: acknowledged, and its sessions are gone since
            self._lost(one, error)

    async def wait(self, a: int, b: int) -> None:
        self.now += 4.0 * a * (1 + b // 8)

    async def _drain(self) -> None:
        """Everything ends; every group is served and acknowledged. Then the books are closed."""
        for trial_id in self.trials:
            await self._end(trial_id, None, status="aborted")
            await self.store.settle(trial_id, now=self.now)
        self.now += 1_000.0
        while granted := await lease(self.store, self.now, most=10, ttl_s=1.0):
            for one in granted:
                await self._ack(one)
        view = await self.store.runs.view(RUN, now=self.now)
        self.seen.append(view.model_dump())
        assert view.groups.in_hand == view.eval_groups.running == 0
        assert view.groups.acknowledged == len(self.trained)
        assert view.sampled == dict(self.spoken), "sampled tokens were lost, or counted twice"
        right: Counter[str] = Counter()
        for tokens in view.not_trained.values():
            right.update(tokens)
        for trials in self.trained.values():
            for tokens in trials.values():
                right.update(tokens)
        assert dict(right) == view.sampled, "the ledger does not balance"
