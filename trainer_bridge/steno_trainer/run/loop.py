"""The training loop, on the first rank: groups in, steps, checkpoints, weights out, again. The order of these is here;
`pushes.py` lets go of groups once a worker serves the weights.

    take groups -> assemble -> step -> checkpoint -> publish -> take groups …
                                                         then: a worker serves the weights -> let go of the groups

A group is acknowledged after the checkpoint that holds its step, and never before: a trainer that dies in between finds the group
in its checkpoint, and neither repeats nor skips it. And it counts as in hand until a worker serves weights that were trained on
it: what is started in its place before that is sampled by older weights than admission reckons with. Weights are pushed
while the next groups are waited for; agents go on all the time. Where steps are lost with their process, their groups are served
again, in their order, to the trainer that takes over, and what the lost weights sampled is trained as well (ADR 16).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from steno.contracts.errors import StenoError
from steno.contracts.runs.leases import RunView
from steno_rollouts.evaluation import Evaluator
from steno_trainer.data.lease_feed import LeasedGroup, LeaseFeed
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.own_estimator import estimator_named
from steno_trainer.data.record_feed import RecordFeed
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.distributed.collective_calls import CollectiveCalls
from steno_trainer.errors import NotFinite
from steno_trainer.reporting.console import ConsoleView
from steno_trainer.reporting.step_posts import Annotations, StepPosts, annotations_of
from steno_trainer.reporting.trackers import Trackers
from steno_trainer.run.ending import Ending
from steno_trainer.run.named_calls import NamedCalls
from steno_trainer.run.named_metrics import NamedMetrics
from steno_trainer.run.pushes import Pushes
from steno_trainer.run.step_numbers import append_line, metrics_line, shown_step
from steno_trainer.run.training_state import TrainingState
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import assemble
from steno_trainer.step.step import StepReport
from steno_trainer.step.step_plan import StepBatch

logger = logging.getLogger(__name__)

LEFT_OUT = "left-out-groups.jsonl"
"""In the folder of checkpoints: a line for each group that can't be trained, with the reason."""
MOST_SKIPPED = 3
OVER_S = 5.0
"""Between two questions whether rollouts are over, while groups are waited for."""


class RunStatus(Protocol):
    def run(self, run_id: str, *, ledger: bool = True) -> Awaitable[RunView]: ...


@dataclass(frozen=True)
class SampleLimits:
    """Of what the model and the ranks take: vocabulary in ids, the longest sample in tokens, and ids that the reference lacks."""

    vocabulary: int
    max_tokens: int
    lacking: frozenset[int] = frozenset()


class Loop:
    """One run of a trainer. Args: feed: entered by `run`; state: changed in place; evaluator: asked before the first step and
    after each whether it is due."""

    def __init__(
        self, settings: RunSettings, calls: CollectiveCalls, feed: LeaseFeed | RecordFeed, state: TrainingState,
        limits: SampleLimits, *, trackers: Trackers, view: ConsoleView, status: RunStatus, evaluator: Evaluator | None = None,
        posts: StepPosts | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._calls, self._feed, self.state = calls, feed, state
        self._limits = limits
        self._estimator = None if settings.imitates else estimator_named(settings.estimator, settings.gdpo_weights)
        self._trackers, self._view = trackers, view
        self._status, self._evaluator, self._posts = status, evaluator, posts
        self._unsaved: list[str] = []  # groups of steps that no checkpoint holds
        self._unserved: list[str] = []  # groups of steps whose weights no worker serves, as far as is known
        self._skipped = 0  # steps in a row that changed no weight
        self._models = tuple(sorted(settings.train_models))
        # Those that a run was started with may be others than these.
        known = state.ledger.total().trained > 0 if state.named_models is None else state.named_models == self._models
        self._named_calls = NamedCalls(
            settings.train_models, found=settings.records is not None or known, to_the_end=settings.is_offline
        )
        self._named_metrics = NamedMetrics(settings.gdpo_metrics)
        self._ending = Ending()
        self._pushes = Pushes(
            calls, state, view, self._ending, deadline_s=settings.push_deadline_s, unserved=lambda: list(self._unserved),
            let_go=self._let_go,
        )  # fmt: skip

    def stop(self) -> None:
        """End after the step that runs, with a checkpoint."""
        self._ending.wanted.set()

    def fail(self, error: BaseException) -> None:
        """End after the duty that runs, without a checkpoint: `run` raises this."""
        self._ending.fail(error)

    async def run(self) -> None:
        """Until `total_steps`, until rollouts are over and all is trained, or `stop`.

        Raises: PushFailed: no worker takes the first weights; ConfigError: as `NamedCalls` and
        `NamedMetrics`; StenoError: the proxy refuses."""
        if not self._settings.is_offline:
            await self._pushes.first()
        # Not before: groups that a checkpoint holds are acknowledged at sight, and what is started in their place is to be
        # sampled by these weights.
        async with self._feed:
            await self._train()

    async def _train(self) -> None:
        if first := await self._evaluated():
            await self._log(first, Ledger(), stepped=False)
        while not self._finished:
            started = time.monotonic()
            self._view.phase(f"waiting for {self._settings.groups_per_step} groups")
            groups = await self._ending.unless_ending(self._take())
            if groups is None:
                break
            if not groups:
                logger.info("run %s: its rollouts are over, and all their groups are used", self.state.run)
                break
            waited_s = time.monotonic() - started
            await self._step(groups, waited_s)
        self._ending.check()
        self._named_calls.check()
        self._named_metrics.check()
        if self._unsaved:
            await self._save(spare=self._skipped > 0)
        await self._pushes.finish()
        self._ending.check()
        await self._let_go(self._unserved)

    @property
    def _finished(self) -> bool:
        total = self._settings.total_steps
        return self._ending.wanted.is_set() or (total is not None and self.state.step >= total)

    # -- a step ------------------------------------------------------------------------------------------------------------

    async def _take(self) -> list[LeasedGroup]:
        settings = self._settings
        at_least = 1 if settings.take_s is not None else None
        watching = asyncio.create_task(self._until_over())
        mending = asyncio.create_task(self._pushes.send_whole())
        mending.add_done_callback(self._ending.ended)  # the groups may never come while these weights are not served
        try:
            taken = await self._feed.take(settings.groups_per_step, at_least=at_least, wait_s=settings.take_s)
        finally:
            watching.cancel()
            if not self._pushes.sends_whole:
                mending.cancel()
            await asyncio.wait({mending})
        if not mending.cancelled():
            mending.result()
        return taken

    async def _until_over(self) -> None:
        """Until rollouts have said that they are over, and all that is left is here: a last step may have fewer groups."""
        while True:
            await asyncio.sleep(OVER_S)
            try:
                found = await self._status.run(self.state.run, ledger=False)
            except StenoError as error:
                logger.warning("can't ask the proxy now whether rollouts are over: %s", error)
                continue
            groups = found.groups
            elsewhere = groups.running + groups.ready + max(0, groups.leased + groups.used - self._feed.held)
            over = found.rollouts_over or self._settings.is_offline
            if over and not elsewhere and self._feed.settled:
                await self._feed.no_more()
                return

    async def _step(self, groups: Sequence[LeasedGroup], waited_s: float) -> None:
        settings, state = self._settings, self.state
        terms = TrainingTerms(
            history=state.history,
            max_staleness_steps=settings.staleness_bound,
            max_tokens=self._limits.max_tokens,
            vocabulary=self._limits.vocabulary,
            lacking=self._limits.lacking,
            policy=settings.policy,
            models=tuple(settings.train_models),
            imitates=settings.imitates,
        )
        # Dynamic sampling has started others in place of silent groups: they are no part of what was drawn.
        count_silent = settings.count_silent_groups and not settings.dynamic_sampling
        ready = await asyncio.to_thread(
            assemble,
            groups,
            terms,
            self._estimator,
            settings.overlong,
            count_silent=count_silent,
            train_silent=settings.distillation > 0,
            report_by=settings.report_by,
        )
        self._named_calls.look(ready.named, ready.other_models)
        self._named_metrics.look(ready.lacking)
        if self._named_calls.found:
            state.named_models = self._models
        report: StepReport | None = None
        if ready.batch.rows:
            self._view.phase(f"training on {ready.trained_tokens:,} tokens")
            report = await self._calls.do("step", ready.batch)
            ready.books.add(report.ledger)
        updated = report is not None and report.updated
        if updated:
            state.history = state.history.stepped()
        await self._name({group: (Reason.MALFORMED, why) for group, why in ready.malformed.items()})
        if report is not None:
            await self._name({group: (Reason.POISONED, why) for group, why in report.poisoned.items()})
        # Groups that say nothing are no step: the weights stay what they are, and so does their version.
        ready.books.check()
        state.ledger.add(ready.books)
        used = [leased.group_id for leased in groups]
        state.trained.update(used)
        self._unsaved += used
        self._unserved += used
        if not updated:
            await self._let_go(used)
        values = ready.values | (report.metrics if report else {}) | {"time/wait_s": waited_s}
        if updated:
            values |= await self._after_step()
        seen = self._seen(ready.batch, report) if report is not None and updated else None
        await self._log(values | await self._queue(), ready.books, stepped=updated, groups=used, seen=seen)
        if report is not None:
            await self._count_skipped(updated)

    async def _name(self, left_out: Mapping[str, tuple[Reason, str]]) -> None:
        """Groups that are left out for good: in the log, and in a file, since nobody trains them again."""
        path = self._settings.checkpoint_dir / LEFT_OUT
        for group_id, (reason, why) in left_out.items():
            logger.error("group %s is not trained (%s): %s", group_id, reason, why)
            line = {"run": self.state.run, "step": self.state.step, "group": group_id, "reason": reason, "why": why}
            await asyncio.to_thread(append_line, path, json.dumps(line) + "\n")

    async def _count_skipped(self, updated: bool) -> None:
        """Raises: NotFinite: so many steps in a row changed nothing that the weights are to blame, and not the groups."""
        self._skipped = 0 if updated else self._skipped + 1
        if self._skipped < MOST_SKIPPED:
            return
        # With these groups in the books: started again, the run goes on with others.
        await self._save(spare=True)
        raise NotFinite(
            f"{self._skipped} steps in a row had no finite loss or gradient after step {self.state.step}: the weights are "
            f"probably broken; resume from an earlier checkpoint with a smaller learning_rate"
        )

    async def _after_step(self) -> dict[str, float]:
        """Checkpoint, acknowledge, publish, evaluate: as far as each is due."""
        settings, step = self._settings, self.state.step
        values: dict[str, float] = {}
        last = settings.total_steps is not None and step >= settings.total_steps
        if step % settings.checkpoint_every == 0 or last:
            values["time/checkpoint_s"] = await self._save()
        if settings.is_offline:
            await self._let_go(list(self._unserved))
        elif step % settings.push_every == 0 or last:
            values["time/gather_s"] = await self._pushes.publish()
            values |= self._pushes.numbers()
        return values | await self._evaluated()

    async def _save(self, *, spare: bool = False) -> float:
        """Make what was trained durable. Args: spare: as `Checkpoints.save`. Returns: seconds for which training stood still."""
        self._ending.check()
        started = time.monotonic()
        self._view.phase("writing a checkpoint")
        await self._calls.do("save_sparing" if spare else "save", self.state)
        seconds = time.monotonic() - started
        unsaved, self._unsaved = self._unsaved, []
        if served := [group_id for group_id in unsaved if group_id not in self._unserved]:
            await self._ending.patiently(self._feed.acknowledge(served))
        return seconds

    async def _let_go(self, groups: Sequence[str]) -> None:
        """Tell the proxy that others may be started in place of these groups; acknowledge those that a checkpoint holds. A group
        that was let go of before is skipped."""
        groups = [group_id for group_id in groups if group_id in self._unserved]
        self._unserved = [group_id for group_id in self._unserved if group_id not in groups]
        if durable := [group_id for group_id in groups if group_id not in self._unsaved]:
            await self._ending.patiently(self._feed.acknowledge(durable))
        await self._ending.patiently(self._feed.used([group_id for group_id in groups if group_id in self._unsaved]))

    # -- numbers ------------------------------------------------------------------------------------------------------------

    async def _evaluated(self) -> dict[str, float]:
        """By the weights of this step, which a worker serves by then. Nothing where none is due, nobody took these weights, or
        what is asked is away now: training goes on without. Raises: StenoError: asking again would not help."""
        step, version = self.state.step, str(self.state.version)
        if self._evaluator is None or not self._evaluator.due(step) or self._ending.wanted.is_set():
            return {}
        self._view.phase("evaluating")
        await self._pushes.over()
        await self._pushes.send_whole()
        await self._pushes.over()
        if self._ending.wanted.is_set():
            return {}
        if not self._pushes.served:  # else older weights would answer
            logger.warning("step %d is not evaluated: no worker serves %s", step, version)
            return {}
        try:
            found = await self._ending.unless_ending(self._evaluator.run(step, version))
        except StenoError as error:
            if not error.retryable:
                raise
            logger.warning("step %d is not evaluated, training goes on: %s", step, error)
            return {}
        values: dict[str, float] = found.scalars() if found is not None else {}
        if "eval/reward" in values:
            self._view.evaluated(step, values["eval/reward"])
        return values

    async def _queue(self) -> dict[str, float]:
        values = {"queue/waiting_groups": float(self._feed.waiting)}
        try:
            run = await self._ending.unless_ending(self._status.run(self._settings.run, ledger=False))
        except StenoError as error:
            if not error.retryable:
                raise
            logger.warning("can't ask the proxy now how many groups are in hand: %s", error)
            return values
        if run is None:
            return values
        groups = run.groups
        values["queue/in_hand_groups"] = float(groups.in_hand)
        self._view.queue(running=groups.running, ready=groups.ready, leased=groups.leased, used=groups.used)
        return values

    async def _log(
        self, values: dict[str, float], books: Ledger, *, stepped: bool, groups: Sequence[str] = (),
        seen: Annotations | None = None,
    ) -> None:  # fmt: skip
        """books: of this step; of the versions in it the accounts are shown as they stand now. groups: that it took. seen: what
        the trainer saw in its tokens."""
        state = self.state
        if self._posts is not None:
            values = values | {"report/unposted": float(self._posts.unposted)}
        accounts = state.ledger.accounts()
        touched = {version: accounts[version] for version in books.accounts()}
        total = state.ledger.total()
        self._trackers.log(state.step, values, total, stepped=stepped)
        self._view.stepped(str(state.version), values, total, touched)
        if (file := self._settings.metrics_file) is not None:
            line = metrics_line(state, values, touched, stepped)
            try:
                await asyncio.to_thread(append_line, file, line)
            except OSError as error:  # as of a tracker that fails
                logger.warning(
                    "metrics_file: the line of step %d is not in %s: %s", state.step, file, error.strerror or error
                )
        if self._posts is not None and (step := shown_step(state, values, groups, stepped)) is not None:
            self._posts.post(step, seen)

    def _seen(self, batch: StepBatch, report: StepReport) -> Annotations | None:
        differences_N, step, version = report.differences_N, self.state.step, str(self.state.version)
        if differences_N is None:
            return None
        return lambda: annotations_of(batch.rows, differences_N, batch.advantages, step=step, version=version)
