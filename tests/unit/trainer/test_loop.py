"""The order of things in the loop, with everything around it that decides it: the feed, admission, the ledger. Weights reach the
workers late, as they do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import ConfigError, Forbidden, Superseded
from steno.contracts.leases import Lease, LeaseRequest
from steno.contracts.records import Group
from steno_rollouts.admission import admissible_groups
from steno_trainer.data import lease_feed as feed_module
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.errors import NotFinite, PushFailed
from steno_trainer.run import ending
from steno_trainer.run import loop as loop_module
from steno_trainer.run.loop import LEFT_OUT, MOST_SKIPPED, Loop, SampleLimits
from steno_trainer.run.named_calls import MOST_STEPS
from steno_trainer.run.training_state import TrainingState
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import says_something
from steno_trainer.step.step import StepReport
from steno_trainer.step.step_plan import StepBatch
from tests.support.waiting import until
from tests.unit.trainer.leasing import FakeProxy
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

GROUPS_PER_STEP = 2
ALL_S = 60.0


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
            recording.turn(None, prompt=2, sampled=3, version=self.served, model=self.names.get(group_id, "policy"))
            self.samples_of[trial.trial_id] = recording.samples(trial)
        return Lease(
            lease_id=group_id, group=Group(group_id=group_id, size=2, created_at=0.0), trials=trials,
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

    patches_refused: it was sent by difference, and is what nobody could take.
    """

    def __init__(self, world: World, version: str, delay_s: float, taken: bool) -> None:
        self.version = version
        self.failed: dict[str, str] = {}
        self.push_s = delay_s
        self.served = self.settled = self.patches_refused = False
        self._world = world
        asyncio.get_running_loop().call_later(delay_s, self.serve if taken else self._fail)

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
    batches: groups that each step trained."""

    def __init__(self, world: World, push_s: float) -> None:
        self.world, self.push_s = world, push_s
        self.refuse: set[int] = set()
        self.by_difference = False  # what is refused is so only until it is sent whole
        self.durable: set[str] = set()
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

    def publish(self, version: PolicyVersion) -> Push:
        again = self.by_difference and any(push.version == str(version) for push in self.pushes)
        taken = version.step not in self.refuse or again
        self.pushes.append(Push(self.world, str(version), self.push_s, taken))
        self.pushes[-1].patches_refused = self.by_difference and not taken
        return self.pushes[-1]


class Mute:
    """A view and trackers that nobody looks at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.asynccontextmanager
async def looped(world: World, crew: Crew, evaluator: Any = None, **fields: Any) -> AsyncIterator[Loop]:
    settings = RunSettings(
        model="m", groups_per_step=GROUPS_PER_STEP, max_staleness_steps=world.bound,
        **{"checkpoint_every": 1, "total_steps": 6, **fields},
    )  # fmt: skip
    settings.check()
    state = TrainingState("r", VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 0))))

    async def run(run_id: str) -> Any:
        waiting = len(world.ready)
        groups = SimpleNamespace(in_hand=world.in_hand, running=0, ready=waiting, leased=0, used=0)
        return SimpleNamespace(groups=groups, rollouts_over=world.over)

    counts = says_something if settings.dynamic_sampling else lambda lease: True
    feed = LeaseFeed(
        world, run_id="r", consumer="t", ahead=GROUPS_PER_STEP, trained=state.trained, counts=counts,  # type: ignore[arg-type]
    )  # fmt: skip
    mute: Any = Mute()
    yield Loop(
        settings, crew, feed, state, SampleLimits(VOCABULARY, 1000),  # type: ignore[arg-type]
        trackers=mute, view=mute, status=SimpleNamespace(run=run), evaluator=evaluator,
    )  # fmt: skip


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3], ids=["each step saved", "some steps saved"])
async def test_admission_alone_keeps_the_bound_while_weights_are_on_their_way(bound: int, every: int) -> None:
    world = World(bound=bound)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, checkpoint_every=every) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
        total = loop.state.ledger.total()
    assert total.untrained == {} and total.trained == total.sampled > 0
    assert crew.durable >= set(world.acknowledged) >= set(crew.trained), (
        "and nothing is acknowledged that could be lost"
    )


async def test_weights_that_are_pushed_now_and_then_count_as_what_they_are() -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, push_every=3) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.ledger.total().untrained == {}
    assert {PolicyVersion.parse(version).step for version in world.started.values()} == {0, 3, 6}


async def test_rollouts_wait_for_weights_that_nobody_takes_at_first() -> None:
    world = World(bound=0)
    crew = Crew(world, push_s=0.1)
    crew.refuse = {2}
    async with looped(world, crew) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: any(push.settled and not push.served for push in crew.pushes))
        started = len(world.started)
        await asyncio.sleep(0.3)
        assert len(world.started) == started, "what older weights sampled now would be stale"
        crew.pushes[-1].serve()  # posted again, and taken
        await asyncio.wait_for(running, ALL_S)
    assert loop.state.ledger.total().untrained == {}


@pytest.mark.parametrize("bound", [0, 1])
async def test_weights_that_nobody_could_take_by_difference_are_sent_whole_before_the_next_step(bound: int) -> None:
    world = World(bound=bound)
    crew = Crew(world, push_s=0.1)
    crew.refuse, crew.by_difference = {2, 4}, True
    async with looped(world, crew) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    pushed = [PolicyVersion.parse(push.version).step for push in crew.pushes]
    assert sorted(set(pushed)) == list(range(7)) and pushed == sorted(pushed), "a version of an earlier step came later"
    assert pushed.count(2) == (2 if bound == 0 else pushed.count(2)) and all(push.served for push in crew.pushes[-1:])
    assert loop.state.ledger.total().untrained == {}


@pytest.mark.parametrize("bound", [0, 1])
async def test_every_step_trains_as_many_groups_where_few_say_something(bound: int) -> None:
    world = World(bound=bound, alike=4)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, dynamic_sampling=True) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
        total = loop.state.ledger.total()
    assert crew.batches == [GROUPS_PER_STEP] * 6
    assert total.untrained.keys() == {"zero_variance"} and total.untrained["zero_variance"] >= 2 * total.trained
    assert crew.durable >= set(world.acknowledged) >= set(crew.trained)


async def test_what_is_stopped_in_the_middle_lets_go_of_all_that_it_saved() -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.1)
    async with looped(world, crew, push_every=2, checkpoint_every=100, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.state.step == 3)
        loop.stop()
        await asyncio.wait_for(running, ALL_S)
    assert set(crew.trained) <= crew.durable == set(world.acknowledged)
    assert not set(world.released) & crew.durable


def left_out(folder: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (folder / LEFT_OUT).read_text().splitlines()]
    return [(row["group"], row["reason"]) for row in rows]


async def test_groups_that_can_not_be_trained_are_named_booked_and_let_go(tmp_path: Path) -> None:
    world = World(bound=1, rewards={"g3": 1e200})
    crew = Crew(world, push_s=0.1)
    crew.poison = {"g6"}
    async with looped(world, crew, checkpoint_dir=tmp_path) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    total = loop.state.ledger.total()
    named = dict(left_out(tmp_path))
    assert named["g3"] == "malformed" and named["g6"] == "poisoned"
    poisoned = {group for group, reason in named.items() if reason == "poisoned"}
    assert total.untrained == {"malformed": 6, "poisoned": 6 * len(poisoned)}
    assert total.sampled == total.trained + 6 + 6 * len(poisoned)
    assert loop.state.step == 6, "a step that changed nothing is none"
    assert {"g3", *poisoned} <= set(world.acknowledged) and not {"g3", *poisoned} & set(crew.trained)


async def test_names_that_no_call_asked_for_end_the_run_before_its_groups_are_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(bound=3)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["main", "sub-*"]) as loop:
        with pytest.raises(ConfigError, match=r"got main, sub-\*; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (loop.state.step, crew.trained, crew.durable, world.acknowledged) == (0, [], set(), [])
    assert caplog.text.count("train_models: got main, sub-*; its calls asked for 'policy'") == MOST_STEPS - 1


async def test_rollouts_that_are_over_before_that_are_not_used_up_either() -> None:
    world = World(bound=3, last=GROUPS_PER_STEP)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["main"]) as loop:
        with pytest.raises(ConfigError, match="train_models: got main; all calls so far asked for 'policy'"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert (crew.durable, world.acknowledged) == (set(), [])


async def test_a_run_whose_names_were_asked_for_goes_on_where_they_are_not() -> None:
    world = World(bound=2, names={f"g{n}": "other" for n in range(GROUPS_PER_STEP, 6 * GROUPS_PER_STEP)})
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["policy"], total_steps=2) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert loop.state.step == 2
    assert loop.state.ledger.total().untrained["other_model"] >= 6 * GROUPS_PER_STEP * (MOST_STEPS + 1)


async def test_steps_whose_rewards_are_equal_say_nothing_of_names(caplog: pytest.LogCaptureFixture) -> None:
    world = World(bound=3, alike=1000, last=2 * GROUPS_PER_STEP)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, train_models=["pol*"]) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    assert "train_models" not in caplog.text


async def test_weights_that_train_nothing_end_the_run_once_its_books_are_saved(tmp_path: Path) -> None:
    world = World(bound=2)
    crew = Crew(world, push_s=0.1)
    crew.poison = {f"g{n}" for n in range(2, 100)}
    async with looped(world, crew, checkpoint_dir=tmp_path, checkpoint_every=100) as loop:
        with pytest.raises(NotFinite, match=f"{MOST_SKIPPED} steps in a row"):
            await asyncio.wait_for(loop.run(), ALL_S)
    assert len(left_out(tmp_path)) == MOST_SKIPPED * GROUPS_PER_STEP
    assert {group for group, _ in left_out(tmp_path)} <= crew.durable & set(world.acknowledged)


async def test_an_acknowledgement_that_fails_ends_the_run_whichever_push_it_was_of() -> None:
    """It is of the first step's groups, and is answered once the weights of the second step are on their way."""
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    world.hold["acknowledge"] = asyncio.Event()
    world.failures["acknowledge"] = [Forbidden("not an admin's key")]
    async with looped(world, crew, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: world.calls["acknowledge"] and len(crew.pushes) >= 3)
        world.hold.pop("acknowledge").set()
        with pytest.raises(Forbidden, match="not an admin's key"):
            await asyncio.wait_for(running, ALL_S)


async def test_who_is_superseded_ends_without_a_checkpoint() -> None:
    world = World(bound=1)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, checkpoint_every=100, total_steps=None) as loop:
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.state.step >= 2)
        loop.fail(Superseded("another trainer has taken over"))
        with pytest.raises(Superseded):
            await asyncio.wait_for(running, ALL_S)
    assert crew.trained and not crew.durable


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for at the end, in the time of a test."""
    monkeypatch.setattr(ending, "ENDING_S", 0.2)
    monkeypatch.setattr(feed_module, "GIVE_BACK_S", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("state", ["first push", "groups", "a push", "acknowledge", "extend", "evaluation", "numbers"])
async def test_it_ends_whatever_it_waits_for(state: str) -> None:
    """The proxy is away, or workers take no weights: nobody answers any more, in none of these calls."""
    world = World(bound=1)
    crew = Crew(world, push_s=1e9 if state == "first push" else 0.0)
    never = asyncio.Event()
    async with looped(world, crew, checkpoint_every=2, total_steps=None) as loop:
        waits = False

        async def stands_still(*_: Any) -> Any:
            nonlocal waits
            waits = True
            await never.wait()

        running = asyncio.create_task(loop.run())
        if state == "first push":
            await until(lambda: crew.pushes)
        else:
            await until(lambda: loop.state.step >= 2)
            for name in ("lease", "samples", "acknowledge", "release", "extend") if state != "a push" else ():
                world.hold[name] = never
            if state == "a push":
                crew.push_s = 1e9
                at = len(crew.pushes)
                await until(lambda: len(crew.pushes) >= at + 2 or crew.pushes[-1].push_s == 1e9)
            elif state in ("evaluation", "numbers"):
                for name in ("lease", "samples", "acknowledge", "extend"):
                    world.hold.pop(name)
                if state == "evaluation":
                    loop._evaluator = SimpleNamespace(due=lambda step: True, run=stands_still)  # type: ignore[assignment]
                else:
                    loop._status = SimpleNamespace(run=stands_still)  # type: ignore[assignment]
                await until(lambda: waits)
        loop.stop()
        await asyncio.wait_for(running, ALL_S)
    assert set(crew.trained) <= crew.durable, "all of it is saved"


@pytest.mark.parametrize("last", [0, 3, 4])
@pytest.mark.parametrize("alike", [0, 3], ids=["all differ", "one of three differs"])
async def test_rollouts_that_are_over_end_the_run_with_all_that_there_is(
    last: int, alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "OVER_S", 0.01)
    world = World(last=last, alike=alike)
    crew = Crew(world, push_s=0.0)
    async with looped(world, crew, total_steps=50, checkpoint_every=50, dynamic_sampling=bool(alike)) as loop:
        await asyncio.wait_for(loop.run(), ALL_S)
    silent = [name for name in world.started if alike and int(name[1:]) % alike]
    assert len(world.started) == last
    assert sorted(crew.trained) == sorted(set(world.started) - set(silent)), "an incomplete step is one"
    assert sorted(world.acknowledged) == sorted(world.started) == sorted(crew.durable)
