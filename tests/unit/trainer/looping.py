"""The trainer's loop with everything around it made up: rollouts, workers, all ranks. What it says to them is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from steno.contracts.records import Group
from steno.contracts.runs.leases import Lease, LeaseRequest
from steno_rollouts.groups.admission import admissible_groups
from steno_trainer.checkpoints.checkpoint import RunState
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.errors import PushFailed
from steno_trainer.run.loop import Loop, SampleLimits
from steno_trainer.run.training_state import TrainingState
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import says_something
from steno_trainer.step.step import StepReport
from steno_trainer.step.step_plan import StepBatch
from tests.unit.trainer.leasing import FakeProxy
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

GROUPS_PER_STEP = 2
ALL_S = 60.0
MADE_AT = itertools.count(1.0)
"""Of groups of all worlds: one with the name of another world's is not that one."""


@dataclass
class World(FakeProxy):
    """Rollouts and workers: a group is sampled whole by the version that is served when admission lets it start, and ready at
    once. alike: of so many groups one has rewards that differ; 0: all have."""

    bound: int = 1
    alike: int = 0
    served: str = "base/0"
    started: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    last: int | None = None  # groups that there are in all
    numbers: Any = field(default_factory=itertools.count)
    rewards: dict[str, float] = field(default_factory=dict)  # of a group's second trial, where it is not 1
    names: dict[str, str] = field(default_factory=dict)  # that a group's calls ask for, where it is not `policy`
    policies: dict[str, str] = field(default_factory=dict)  # whose a group's calls are, where not the one's in training

    @property
    def in_hand(self) -> int:
        return len(self.started) - len(self.used)

    @property
    def over(self) -> bool:
        return self.last is not None and len(self.started) >= self.last

    def admit(self) -> None:
        room = admissible_groups(in_hand=self.in_hand, groups_per_step=GROUPS_PER_STEP, max_staleness_steps=self.bound)
        for _ in range(room):
            if self.over:
                return
            self.serve(self._rolled_out(f"g{next(self.numbers)}"))

    def _rolled_out(self, group_id: str) -> Lease:
        self.started[group_id] = self.served
        differs = not self.alike or int(group_id[1:]) % self.alike == 0
        trials = [
            session(f"{group_id}.{i}", group_id, reward=float(i * differs) * self.rewards.get(group_id, 1.0))
            for i in range(2)
        ]
        for trial in trials:
            recording = Recording()
            recording.turn(
                None, prompt=2, sampled=3, version=self.served, model=self.names.get(group_id, "policy"),
                policy=self.policies.get(group_id, "default"),
            )  # fmt: skip
            self.samples_of[trial.trial_id] = recording.samples(trial)
        return Lease(
            lease_id=group_id, group=Group(group_id=group_id, size=2, created_at=next(MADE_AT)), trials=trials,
            tokens={trial.trial_id: {self.served: 3} for trial in trials}, expires_at=1e12,
        )  # fmt: skip

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        while not self.ready:
            self.admit()
            await asyncio.sleep(0.01 if self.over else 0)
        return await super().lease(request)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False) -> None:
        await super().extend(lease_id, ttl_s, used=used)
        if used:
            self.used.add(lease_id)

    async def acknowledge(self, lease_id: str) -> None:
        await super().acknowledge(lease_id)
        self.used.add(lease_id)


class Push:
    """A `Publication` that settles after `delay_s`: served by every worker, or, if it is not taken, by none.

    patches_refused: it was sent by difference, and is what nobody could take. uploading: for `upload_s`.
    """

    def __init__(self, world: World, version: str, delay_s: float, taken: bool, upload_s: float = 0.0) -> None:
        self.version, self.outcome = version, "running"
        self.failed: dict[str, str] = {}
        self.push_s = delay_s
        self.served = self.settled = self.patches_refused = False
        self.uploading = bool(upload_s)
        self._world = world
        loop = asyncio.get_running_loop()
        loop.call_later(upload_s, setattr, self, "uploading", False)
        loop.call_later(upload_s + delay_s, self.serve if taken else self._fail)

    def serve(self) -> None:
        self._world.served = self.version
        self.settled = self.served = True

    def _fail(self) -> None:
        self.settled = True

    def wait(self, timeout_s: float) -> Any:
        if not self.served:
            raise PushFailed("refused")
        return SimpleNamespace(state="done", workers=[SimpleNamespace(pause_s=0.0, state="served")])


class Crew:
    """All ranks: steps, checkpoints and pushes that only say what they were told. durable: groups that a checkpoint holds;
    batches: how many groups each step trained."""

    def __init__(self, world: World, push_s: float) -> None:
        self.world, self.push_s, self.upload_s = world, push_s, 0.0
        self.refuse: set[int] = set()
        self.by_difference = False  # what is refused is so only until it is sent whole
        self.durable: set[str] = set()
        self.saves: list[tuple[int, bool]] = []  # of each checkpoint its step, and whether all older steps were spared
        self.trained: list[str] = []
        self.batches: list[int] = []
        self.pushes: list[Push] = []
        self.poison: set[str] = set()  # groups with which a step changes no weight

    async def do(self, name: str, argument: Any = None) -> Any:
        await asyncio.sleep(0.01)
        return getattr(self, name)(argument)

    def step(self, batch: StepBatch) -> StepReport:
        ledger = Ledger()
        groups = sorted({row.group_id for row in batch.rows})
        spoiled = self.poison & set(groups)
        for row in batch.rows:
            for version, tokens in row.trained_by_version().items():
                if spoiled:
                    ledger.untrained(version, Reason.POISONED, tokens)
                else:
                    ledger.trained(version, tokens)
        if spoiled:
            return StepReport(0, {}, ledger, 1, False, dict.fromkeys(groups, "the loss is nan"))
        self.trained += groups
        self.batches.append(len(groups))
        return StepReport(0, {}, ledger, 1)

    def save(self, state: TrainingState) -> None:
        self.durable |= state.trained
        self.saves.append((state.step, False))

    def save_sparing(self, state: TrainingState) -> None:
        self.durable |= state.trained
        self.saves.append((state.step, True))

    def publish(self, version: PolicyVersion) -> Push:
        again = self.by_difference and any(push.version == str(version) for push in self.pushes)
        taken = version.step not in self.refuse or again
        self.pushes.append(Push(self.world, str(version), self.push_s, taken, self.upload_s))
        self.pushes[-1].patches_refused = self.by_difference and not taken
        return self.pushes[-1]


class Mute:
    """A view and trackers that nobody looks at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.asynccontextmanager
async def looped(
    world: World, crew: Crew, evaluator: Any = None, saved: RunState | None = None, **fields: Any
) -> AsyncIterator[Loop]:
    """Args: saved: of a checkpoint that is gone on from."""
    settings = RunSettings(
        model="m", groups_per_step=GROUPS_PER_STEP, max_staleness_steps=world.bound,
        **{"checkpoint_every": 1, "total_steps": 6, **fields},
    )  # fmt: skip
    settings.check()
    if saved is not None:
        state = TrainingState.of(saved)
    else:
        state = TrainingState("r", VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 0))))

    async def run(run_id: str, *, ledger: bool) -> Any:
        waiting = len(world.ready)
        groups = SimpleNamespace(in_hand=world.in_hand, running=0, ready=waiting, leased=0, used=0)
        return SimpleNamespace(groups=groups, rollouts_over=world.over)

    counts = says_something if settings.dynamic_sampling else lambda lease: True
    feed = LeaseFeed(
        world, run_id="r", consumer="t", ahead=GROUPS_PER_STEP, trained=state.trained,  # type: ignore[arg-type]
        acknowledged=state.acknowledged, counts=counts,
    )  # fmt: skip
    mute: Any = Mute()
    yield Loop(
        settings, crew, feed, state, SampleLimits(VOCABULARY, 1000),  # type: ignore[arg-type]
        trackers=mute, view=mute, status=SimpleNamespace(run=run), evaluator=evaluator,
    )  # fmt: skip
