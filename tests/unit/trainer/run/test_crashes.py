"""A trainer that is killed at any point of its loop, and started again: no group is skipped, none is trained twice into what
survives, and nothing that was sampled is lost.

The store of runs is the proxy's own, and so are the rules of leases; feed, loop, ledger, staleness and the folder of lineages
are the trainer's own. Only the ranks' duties and the clock are played: a checkpoint is the state's bytes, weights are a
version's name. A kill is a point from which nothing of that trainer goes on or reaches anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from steno.contracts.errors import Superseded, Unreachable
from steno.contracts.records import Turn, ids_to_bytes
from steno.contracts.rest import SampleList
from steno.contracts.runs.leases import Lease, LeaseName, LeaseRequest, RunView
from steno_proxy.api import lease_wait
from steno_proxy.sessions.samples import samples
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.runs.account import GroupStatus
from steno_rollouts.groups.admission import admissible_groups
from steno_trainer.checkpoints.checkpoint import RunState
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.staleness import FIRST, PolicyVersion, VersionHistory
from steno_trainer.run import loop as loop_module
from steno_trainer.run.loop import Loop, SampleLimits
from steno_trainer.run.training_state import TrainingState
from steno_trainer.run_config import RunSettings
from steno_trainer.step.step import StepReport
from steno_trainer.step.step_plan import StepBatch
from tests.support.records.groups import end, group, speak

RUN, PER_STEP, BOUND, STEPS, ALL_S = "r", 2, 1, 8, 120.0
POINTS = (
    "before lease", "after lease", "in assembly", "after backward", "after update", "before checkpoint", "after checkpoint",
    "before publish", "after publish", "before acknowledge", "after acknowledge", "after used",
)  # fmt: skip


class Killed(Exception):
    """Of what can't just stand still: a thread."""


class World:
    """The proxy's store, agents, workers and a disk: what outlives a trainer. served: the version that agents are answered by.
    forgets: the store loses acknowledgements while the trainer lives."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder, self.now = MemoryStore(), folder, 1_000.0
        self.served = f"{FIRST}/0"
        self.running: list[str] = []
        self.turns = 0
        self.saved: bytes | None = None
        self.surviving: list[str] = []  # groups that are trained into the checkpoint, in their order
        self.checkpoints: list[tuple[bytes, list[str]]] = []
        self.forgets = False
        self._before: dict[str, GroupStatus] = {}  # groups that are acknowledged, as they were before

    async def view(self) -> RunView:
        return await self.store.runs.view(RUN, now=self.now)

    async def acknowledge(self, lease_id: str) -> None:
        name = LeaseName.decode(lease_id).group_id
        before = self.store.runs._run(RUN).groups[name]
        await self.store.runs.acknowledge(lease_id, now=self.now)
        self._before[name] = before

    def forget(self) -> None:
        """All acknowledgements, as Redis may after a failover, or from an older backup. The leases have run out since."""
        run = self.store.runs._run(RUN)
        for name, before in self._before.items():
            run.groups[name] = msgspec.structs.replace(before, expires_at=self.now)
        run.totals["train:acknowledged"] -= len(self._before)
        self._before = {}

    async def agents(self) -> None:
        """Whoever ran speaks a second time, by whatever is served now, and ends; then as many start as are admitted."""
        for name in self.running:
            await self._say(f"{name}.1")
            for number in range(2):
                await end(self.store, f"{name}.{number}", float(number), now=self.now)
        self.running = []
        in_hand = (await self.view()).groups.in_hand
        for _ in range(admissible_groups(in_hand=in_hand, groups_per_step=PER_STEP, max_staleness_steps=BOUND)):
            name = f"g{self.turns:04d}"
            await group(self.store, name, run_id=RUN)
            await self._say(f"{name}.0")
            self.running.append(name)

    async def _say(self, trial_id: str) -> None:
        self.turns += 1
        await speak(
            self.store, trial_id, 3, version=self.served, number=self.turns, new_prompt_ids=ids_to_bytes([1, 2]),
            prompt_tokens=2, prompt_digest=b"",
        )  # fmt: skip


class Life:
    """One start of a trainer. die: at the Nth time of a point. killed: it is dead."""

    def __init__(self, world: World, name: str, die: tuple[str, int] | None = None) -> None:
        self.world, self.name, self.die = world, name, die
        self.seen: Counter[str] = Counter()
        self.killed = asyncio.Event()
        self.dead = False
        self.epoch = 0
        self.trained: list[str] = []

    def reached(self, point: str) -> bool:
        self.seen[point] += 1
        return self.die == (point, self.seen[point])

    async def point(self, name: str) -> None:
        if self.reached(name):
            self.dead = True
            self.killed.set()
        if self.dead:
            await asyncio.Event().wait()  # for good: it is cancelled with all the rest

    def _alive(self) -> None:
        """A killed trainer is torn down in this process, where it would just be no more: what it says then reaches nobody."""
        if self.dead:
            raise Unreachable("it was killed")

    # -- the proxy's client

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        self._alive()
        await self.point("before lease")
        found: list[Lease] = []
        while not found:
            await self.point("asking")
            await self.world.agents()
            found = await lease_wait.lease(
                self.world.store.runs, request.model_copy(update={"wait_s": 0.0}), _stays, lambda: self.world.now,
                epoch=self.epoch,
            )  # fmt: skip
            await asyncio.sleep(0)
        await self.point("after lease")
        return found

    async def acknowledge(self, lease_id: str) -> None:
        await self.point("before acknowledge")
        await self.world.acknowledge(lease_id)
        await self.point("after acknowledge")

    async def release(self, lease_id: str) -> None:
        self._alive()
        await self.world.store.runs.release(lease_id, now=self.world.now)

    async def extend(self, lease_id: str, ttl_s: float, *, used: bool = False) -> None:
        await self.world.store.runs.extend(lease_id, ttl_s, used=used, now=self.world.now)
        await self.point("after used")

    async def sample_list(self, trial_id: str) -> SampleList:
        return samples(await self.world.store.session(trial_id), await self.world.store.turns(trial_id))

    async def turns(self, trial_id: str) -> AsyncIterator[Turn]:
        for one in await self.world.store.turns(trial_id):
            yield one

    async def run(self, run_id: str, *, ledger: bool) -> RunView:
        return await self.world.view()

    # -- the ranks' duties

    async def do(self, name: str, argument: Any = None) -> Any:
        await asyncio.sleep(0)
        return await getattr(self, f"_{name}")(argument)

    async def _step(self, batch: StepBatch) -> StepReport:
        await self.point("after backward")
        ledger = Ledger()
        for row in batch.rows:
            for version, tokens in row.trained_by_version().items():
                ledger.trained(version, tokens)
        self.trained += sorted({row.group_id for row in batch.rows})
        await self.point("after update")
        return StepReport(0, {}, ledger, 1)

    async def _save(self, state: TrainingState) -> None:
        await self.point("before checkpoint")
        self.lineages.check()
        self.world.saved = msgspec.msgpack.encode(state.saved())
        self.world.surviving = list(self.trained)
        self.world.checkpoints.append((self.world.saved, self.world.surviving))
        if self.world.forgets and state.step <= STEPS - 3:  # else the run may end before all is served again
            self.world.forget()
        await self.point("after checkpoint")

    async def _publish(self, version: PolicyVersion) -> Any:
        await self.point("before publish")
        self.lineages.pushing(version)
        self.lineages.handed_over("weights")
        self.world.served = str(version)
        await self.point("after publish")
        done = SimpleNamespace(state="done", workers=[SimpleNamespace(pause_s=0.0, state="served")])
        return SimpleNamespace(
            version=str(version), served=True, settled=True, uploading=False, failed={}, push_s=0.0,
            wait=lambda timeout_s: done,
        )  # fmt: skip

    # -- a life

    async def begin(self, every: int) -> Loop:
        """As main.py does it: the run first, then the checkpoint."""
        world = self.world
        tenure = await world.store.runs.take_over(RUN, self.name, now=world.now)
        self.epoch = tenure.epoch
        read = msgspec.msgpack.decode(world.saved, type=RunState) if world.saved else None
        state = TrainingState.of(read) if read else TrainingState(RUN, VersionHistory((PolicyVersion(FIRST, 0),)))
        self.trained = list(world.surviving)
        self.lineages = Lineages(world.folder, RUN)
        parent = state.version
        self.lineages.begin(self.name, parent, self.epoch)
        state.history = state.history.resumed(self.name).knowing(self.lineages.others())
        settings = RunSettings(
            model="m",
            run=RUN,
            groups_per_step=PER_STEP,
            max_staleness_steps=BOUND,
            total_steps=STEPS,
            checkpoint_every=every,
        )
        self.feed = LeaseFeed(
            self, run_id=RUN, consumer=self.name, ahead=PER_STEP, trained=state.trained,  # type: ignore[arg-type]
            acknowledged=state.acknowledged,
        )  # fmt: skip
        mute: Any = Mute()
        return Loop(settings, self, self.feed, state, SampleLimits(50, 1000), trackers=mute, view=mute, status=self)  # type: ignore[arg-type]

    async def live(self, every: int) -> Ledger | None:
        """To its end, or until it is killed. Returns: its books, if it came to its end."""
        loop = await self.begin(every)
        running, dying = asyncio.create_task(loop.run()), asyncio.create_task(self.killed.wait())
        try:
            await asyncio.wait({running, dying}, timeout=ALL_S, return_when=asyncio.FIRST_COMPLETED)
            if self.killed.is_set():
                return None
            running.result()
            return loop.state.ledger
        finally:
            left = [running, dying, *loop._pushes._serving, *self.feed._tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class Mute:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


async def _stays() -> bool:
    return False


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Life], None]:
    """Lets a life be killed while its groups become a batch, which a thread does."""
    right, now = loop_module.assemble, SimpleNamespace(life=None)

    def mortal(*args: Any, **more: Any) -> Any:
        if now.life.reached("in assembly"):
            now.life.dead = True
            raise Killed
        return right(*args, **more)

    monkeypatch.setattr(loop_module, "assemble", mortal)
    return lambda life: setattr(now, "life", life)


async def _play(
    folder: Path, assembly: Callable[[Life], None], every: int, *kills: tuple[str, int], forgets: bool = False
) -> None:
    world = World(folder)
    world.forgets = forgets
    for number, die in enumerate(kills):
        life = Life(world, f"life{number}", die)
        assembly(life)
        with contextlib.suppress(Killed):
            assert await life.live(every) is None, f"{die} was never reached: {life.seen}"
        world.now += 15.0  # not heard of for so long
        if forgets:
            world.forget()
    await _play_to_the_end(world, assembly, every)


async def _play_to_the_end(world: World, assembly: Callable[[Life], None], every: int) -> None:
    last = Life(world, "last")
    assembly(last)
    ledger = await last.live(every)
    assert ledger is not None
    total = ledger.total()
    assert total.untrained == {}, "nothing is orphaned, and nothing stale"
    assert total.trained == total.sampled == 6 * PER_STEP * STEPS
    assert len(set(world.surviving)) == len(world.surviving) == PER_STEP * STEPS, "none was trained twice"
    groups = world.store.runs._run(RUN).groups
    served = sorted(groups, key=lambda name: int(groups[name].order or 10**9))
    assert world.surviving == served[: PER_STEP * STEPS], "none was skipped"
    view = await world.view()
    assert view.groups.acknowledged == PER_STEP * STEPS
    assert view.groups.leased == view.groups.used == 0


@pytest.mark.parametrize("every", [1, 3], ids=["each step saved", "some steps saved"])
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_any_point_it_loses_nothing(
    tmp_path: Path, assembly: Callable[[Life], None], point: str, every: int
) -> None:
    # The first time is before the first checkpoint, where there is nothing to go on from.
    for number in (1, 2 if "checkpoint" in point else 3):
        if every == 1 and point == "after used":
            continue  # a group that is saved at once is acknowledged, and never only used
        await _play(tmp_path / str(number), assembly, every, (point, number))


async def test_killed_again_and_again_it_loses_nothing(tmp_path: Path, assembly: Callable[[Life], None]) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        points = [point for point in POINTS if point != "after used"]
        kills = [(draw.choice(points), 1) for _ in range(draw.randint(2, 4))]
        await _play(tmp_path / str(seed), assembly, draw.choice((2, 3, 5)), *kills)


@pytest.mark.parametrize("kills", [[], [("before checkpoint", 4)], [("after checkpoint", 4), ("before publish", 2)]])
async def test_acknowledgements_that_redis_forgets_skip_nothing_and_train_nothing_twice(
    tmp_path: Path, assembly: Callable[[Life], None], kills: list[tuple[str, int]]
) -> None:
    await _play(tmp_path, assembly, 1, *kills, forgets=True)


async def test_who_goes_back_to_an_older_checkpoint_trains_again_what_came_after_it_if_redis_forgot_that(
    tmp_path: Path, assembly: Callable[[Life], None]
) -> None:
    world = World(tmp_path)
    life = Life(world, "first")
    assembly(life)
    assert await life.live(1) is not None
    world.saved, world.surviving = world.checkpoints[STEPS // 2]
    world.now += 15.0
    world.forget()
    await _play_to_the_end(world, assembly, 1)


async def test_weights_of_the_same_name_that_are_others_are_no_ancestors(tmp_path: Path) -> None:
    """A run that was begun again with another model, before anything was saved."""
    for lineage, digest in (("a", "one"), ("b", "other"), ("c", "one")):
        lineages = Lineages(tmp_path, RUN)
        lineages.begin(lineage, PolicyVersion(FIRST, 0), None)
        lineages.pushing(PolicyVersion(lineage, 2))
        lineages.handed_over(digest)
    (tmp_path / "lineages" / "torn.json").write_bytes(b'{"run"')
    other = Lineages(tmp_path, "another run")
    other.begin("d", PolicyVersion("x", 3), None)
    assert lineages.others() == {"a": (PolicyVersion(FIRST, 0), 2)}
    history = VersionHistory((PolicyVersion(FIRST, 0), PolicyVersion("c", 0))).knowing(lineages.others())
    assert history.behind(PolicyVersion("a", 0)) == (0, 0) and history.behind(PolicyVersion("a", 2)) == (2, 2)
    assert history.behind(PolicyVersion("b", 0)) is None


async def test_who_is_taken_over_from_writes_no_checkpoint_and_ends(
    tmp_path: Path, assembly: Callable[[Life], None]
) -> None:
    """It stood still for longer than it is waited for, and goes on in the middle of a step."""
    world = World(tmp_path)
    old = Life(world, "old")
    assembly(old)
    loop = await old.begin(1)
    stopped, go_on = asyncio.Event(), asyncio.Event()
    step = old._step

    async def held(batch: StepBatch) -> StepReport:
        if loop.state.step == 2:
            stopped.set()
            await go_on.wait()
        return await step(batch)

    old._step = held  # type: ignore[method-assign]
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(stopped.wait(), ALL_S)
    world.now += 15.0
    await Life(world, "new").begin(1)
    saved = world.saved
    go_on.set()
    with pytest.raises(Superseded, match="epoch 2"):
        await asyncio.wait_for(running, ALL_S)
    assert world.saved == saved
