"""The rollout worker, the weight transfer and the checkpoints of TRL's `AsyncGRPOTrainer`: `AsyncRollouts`.

TRL's trainer takes rows from a queue, one after the other, and pushes weights after each step. Rows are those of leased groups,
several per trial where it forked, with the log-probabilities that they were sampled at; TRL's loss takes its ratios to these.
A group is acknowledged once a checkpoint has it, so none is lost or trained twice, whoever dies.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from steno.contracts.errors import BadRequest, StenoError
from steno.contracts.runs.leases import RunGroups
from steno_adapters.collected_group import CollectedGroup
from steno_adapters.collector import Collector
from steno_adapters.trl.failed_groups import STOP_AFTER, FailedGroups, NothingToTrain
from steno_adapters.trl.fresh_rows import FreshRows, QueuedRow, rollout_sample
from steno_adapters.trl.group_rewards import Advantages, grpo_advantages
from steno_adapters.trl.private_names import count_groups_before, rows_of_step
from steno_adapters.trl.row_progress import RowProgress
from steno_adapters.trl.row_refusal import judged
from steno_adapters.trl.unused_settings import UNUSED_BY_ASYNC, check_unused
from steno_adapters.trl.version_count import VersionCount
from steno_adapters.trl.whole_weights import check_unquantised, streamed_weights
from steno_rollouts.tasks.task import Task

log = logging.getLogger(__name__)

LINEAGES = "steno-lineages.json"
"""In the trainer's output folder: every start, and the step that it went on from."""
LEASE_WAIT_S = 1.0
PAUSE_S = 0.5


class AsyncRollouts:
    """RolloutWorkerProtocol and WeightTransferProtocol of TRL's, for one call of `train()`.

    counts: since it began: `groups`, `rows`, tokens that were not trained by reason (`untrained/stale`, `untrained/too_long`,
    `untrained/temperature`, `untrained/orphaned`, and those of `CollectedGroup.untrained`), `failed_trials`.
    """

    def __init__(
        self,
        collector: Collector,
        tasks: Iterable[Task | Mapping[str, Any]] | None = None,
        *,
        n: int = 8,
        advantages: Advantages = grpo_advantages,
        stop_after_failed_groups: int = STOP_AFTER,
        push_timeout_s: float = 600.0,
        push_folder: Path | None = None,
    ) -> None:
        """
        Args:
            tasks: each is rolled out again and again, `n` trials at a time, no further ahead than the config's `max_staleness`.
                None: `steno rollout --run` does that elsewhere.
            advantages: of a group's rewards.
            stop_after_failed_groups: training ends with an error after so many groups in a row of which nothing could be
                trained: all trials failed, or all rows were dropped for what the config says. 0: it waits for better ones.
            push_timeout_s, push_folder: `timeout_s` and `folder` of `push`.
        Raises: BadRequest: an empty list of tasks.
        """
        self._collector, self._n, self._advantages = collector, n, advantages
        self._tasks = None if tasks is None else list(tasks)
        if self._tasks == []:
            raise BadRequest(
                "tasks: got none, must be at least one, or None where they are rolled out elsewhere", field="tasks"
            )
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.rollout_buffer = FreshRows(self.take)
        self.counts = Counter[str]()
        self.progress = RowProgress()
        self.model_version = 0
        self.versions = VersionCount([(f"trl-{uuid.uuid4().hex[:8]}", 0)])
        self._step = 0
        self._push_options = {"timeout_s": push_timeout_s, "folder": push_folder}
        self._lock = threading.RLock()
        self._held: dict[str, CollectedGroup] = {}  # without their rows
        self._to_mark: set[str] = set()  # groups that are used, which the proxy does not know yet
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._rolling: Future[Any] | None = None
        self._failure: BaseException | None = None
        self._heard = time.monotonic()
        self._trainer: Any = None
        self._without_rows, self._dropped = (FailedGroups(stop_after_failed_groups) for _ in range(2))
        self._seen: RunGroups  # of the run, at the last look
        self._group_trained = False  # a row of the group whose rows are being taken

    def trainer(self, model: str, args: AsyncGRPOConfig, **options: Any) -> AsyncGRPOTrainer:
        """The trainer, with all of this in its place; `options` are its other arguments.

        Raises: BadRequest: what the config says can't hold here.
        """
        if self._trainer is not None:
            raise BadRequest("trainer: this AsyncRollouts has one already, make another one for each", field="trainer")
        if self._tasks is None and args.max_steps <= 0:
            raise BadRequest(
                f"max_steps: got {args.max_steps}, must be at least 1 where tasks are rolled out elsewhere",
                field="max_steps",
            )
        check_unused(UNUSED_BY_ASYNC, args, options, self._n)
        if args.token_budget is None:
            args.token_budget = 0  # else TRL asks a vLLM server of its own
        ids = [_task_id(task) for task in self._tasks] if self._tasks else ["elsewhere"]
        options = {"train_dataset": Dataset.from_dict({"prompt": ids})} | options
        callbacks = [_SavedProgress(self), *options.pop("callbacks", [])]
        self._trainer = AsyncGRPOTrainer(
            model, args=args, callbacks=callbacks, rollout_worker=self, weight_transfer=self, **options
        )  # fmt: skip
        check_unquantised(self._trainer)
        return self._trainer

    # -- RolloutWorkerProtocol ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        args = self._trainer.args
        self._seen = self._collector.client.run(self._collector.run, ledger=False).groups
        if self._tasks is not None:
            # What a step has taken does not count as in hand, so the bound is one step lower than TRL's.
            self._rolling = self._collector.start(
                itertools.cycle(self._tasks), self._n, groups_per_step=max(1, -(-self._rows_per_step // self._n)),
                max_staleness_steps=max(0, args.max_staleness - 1),
            )  # fmt: skip
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="steno-rows", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._rolling is not None:
            self._rolling.cancel()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises: RuntimeError: no row will come, and why."""
        over = self._rolling is not None and self._rolling.done() and not self._rolling.cancelled()
        rolled_out = self._rolling.exception() if self._rolling is not None and over else None
        if failure := self._failure or rolled_out:
            raise RuntimeError(f"rollouts of run {self._collector.run} have ended: {failure}") from failure
        if (silent_s := time.monotonic() - self._heard) > stale_after_s:
            raise RuntimeError(f"the proxy has not answered for {silent_s:.0f} s")

    # -- WeightTransferProtocol -----------------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Every push stands for itself."""

    def pause(self) -> None:
        """Workers pause by themselves, for as long as they swap weights."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        weights = streamed_weights(self._trainer, iterator)
        version = self.versions.push(self._step)
        self._collector.push(weights, version, parent=self.versions.parent, **self._push_options)

    def resume(self) -> None:
        """As `pause`."""

    def destroy(self) -> None:
        """Nothing is held open."""

    # -- checkpoints, from the callback ---------------------------------------------------------------------------------------

    def began(self, step: int, output: Path, every: int, saved: Mapping[str, Any]) -> None:
        """Training begins at optimizer step `step`, from a checkpoint that says `saved`, if from any."""
        file = output / LINEAGES
        starts = [(str(lineage), int(at)) for lineage, at in json.loads(file.read_text())] if file.exists() else []
        lineage = self.versions.lineage
        self.versions = VersionCount([*starts, (lineage, step)], every)
        output.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(self.versions.starts))
        new.replace(file)
        self._step, self.progress = step, RowProgress.restored(saved)
        count_groups_before(self._trainer, self.progress.groups)

    def stepped(self, step: int) -> None:
        rows = rows_of_step(self._trainer)
        with self._lock:
            self._step = step
            self.progress.trained(rows)

    def acknowledge(self) -> None:
        """What is finished is durable. A group that can't be acknowledged now is with the next checkpoint."""
        with self._lock:
            groups = [self._held[name] for name in self.progress.finished if name in self._held]
        for group in groups:
            self._acknowledge(group)

    def saved(self) -> dict[str, Any]:
        with self._lock:
            return self.progress.saved()

    # -- rows, in a thread of its own -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._lease()
                    self._heard = time.monotonic()
                except StenoError as error:
                    if not error.retryable:
                        raise
                    log.warning("no groups: %s", error)
                    self._stopping.wait(PAUSE_S)
        except NothingToTrain as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """`check_health` says so, once the trainer has taken the rows that there are."""
        self._failure = error
        if self._rolling is not None:
            self._rolling.cancel()

    @property
    def _rows_per_step(self) -> int:
        args = self._trainer.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _lease(self) -> None:
        self._mark_used()
        if self.rollout_buffer.qsize() > 2 * self._rows_per_step:
            self._stopping.wait(PAUSE_S)
            return
        groups = self._collector.lease(8, LEASE_WAIT_S)
        for group in groups:
            self._came(group)
        self._count_failed(groups)

    def _mark_used(self) -> None:
        """Tell the proxy which groups the trainer has every row of: others may begin in their place. Each group is told again
        until the proxy has it, since no trial begins while too many groups are in hand. Raises: StenoError: the proxy is away."""
        with self._lock:
            groups = [self._held[name] for name in self._to_mark if name in self._held]
            self._to_mark.intersection_update(group.group_id for group in groups)
        for group in groups:
            try:
                self._collector.used([group])
            except StenoError as error:
                if error.retryable:
                    raise
                log.warning("the lease of group %s was lost: %s", group.group_id, error)  # it comes again, by another
            with self._lock:
                if self._held.get(group.group_id) is group:
                    self._to_mark.discard(group.group_id)

    def _count_failed(self, came: list[CollectedGroup]) -> None:
        """Raises: NothingToTrain."""
        trainable = any(group.rows for group in came)
        if trainable:
            self._without_rows.trainable()
        view = self._collector.client.run(self._collector.run, ledger=False)
        before, self._seen = self._seen, view.groups
        # Groups in which no trial can be trained are `empty`, and never leased.
        if not trainable and (failed := max(0, self._seen.empty - before.empty) + len(came)):
            self._without_rows.failed(failed, self._collector.failures, before.running)
        groups = view.groups
        held_here = groups.leased + groups.used <= len(self._held)
        if view.rollouts_over and self._tasks is None and held_here and not (came or groups.running or groups.ready):
            steps = self._trainer.args.max_steps
            raise NothingToTrain(f"no groups are left before max_steps {steps}; roll out more, or set a lower one")

    def _came(self, group: CollectedGroup) -> None:
        held = replace(group, rows=[])  # which are in the queue: until a checkpoint has them they would fill the memory
        with self._lock:
            again = group.group_id in self._held  # its lease had run out: its rows are on their way
            self._held[group.group_id] = held
            if again:
                if self.progress.taken(group.group_id):
                    self._to_mark.add(group.group_id)  # of this lease the proxy does not know it
                return
            already = self.progress.begin(group.group_id, len(group.rows), group.lease.group.created_at)
        if already < len(group.rows):
            self._put(group, already)
            return
        if group.rows:
            log.info("group %s was trained before: acknowledged", group.group_id)
        else:
            self._count(group)
        self._acknowledge(held)

    def _acknowledge(self, group: CollectedGroup) -> None:
        try:
            self._collector.acknowledge([group])
        except StenoError as error:
            log.warning("group %s was not acknowledged: %s", group.group_id, error)
            return
        with self._lock:
            # The trainer's thread and that of the rows may have acknowledged one group at a time.
            if self._held.get(group.group_id) is group:
                self.progress.acknowledged(group.group_id, group.lease.group.created_at)
                del self._held[group.group_id]

    def _count(self, group: CollectedGroup) -> None:
        self.counts.update({f"untrained/{reason}": tokens for reason, tokens in group.untrained.items()})
        self.counts.update({"groups": 1, "rows": len(group.rows), "failed_trials": len(group.left_out)})
        self.metrics_queue.put({"steno/groups_total": 1.0, "steno/failed_trials_total": float(len(group.left_out))})

    def _put(self, group: CollectedGroup, already: int) -> None:
        self._count(group)
        advantages, number = self._advantages(group.rewards), next(self._numbers)
        rewards = np.array(list(group.rewards.values()))
        for row in group.rows[already:]:
            metrics = {"reward": row.reward, "reward_std": float(rewards.std())}
            sample = rollout_sample(row, advantages[row.trial_id], number, metrics)
            self.rollout_buffer.put(QueuedRow(group.group_id, row, sample))

    def take(self, queued: QueuedRow) -> RolloutSample | None:
        """Returns: the row for the trainer; None: it can't be trained by now. Raises: RuntimeError: as `check_health`."""
        args = self._trainer.args
        reason, why, number = judged(
            queued.row, temperature=args.temperature, token_budget=args.token_budget, max_staleness=args.max_staleness,
            model_version=self.model_version, versions=self.versions,
        )  # fmt: skip
        with self._lock:
            last = self.progress.handed_over(queued.group_id, dropped=reason is not None)
            if last:
                self._to_mark.add(queued.group_id)
        trained = self._group_trained or reason is None
        self._group_trained = trained and not last
        if reason is None:
            self._dropped.trainable()
            queued.sample.model_version = number
            return queued.sample
        row = queued.row
        self.counts[f"untrained/{reason}"] += row.trained_tokens
        self.metrics_queue.put({f"steno/untrained_{reason}_tokens_total": float(row.trained_tokens)})
        log.info("a row of trial %s is not trained: %s", row.trial_id, reason)
        if why and last and not trained:
            try:
                self._dropped.failed(1, [f"trial {row.trial_id}: {why}"])
            except NothingToTrain as error:
                self._fail(error)
                self.check_health(float("inf"))
        return None


class _SavedProgress(TrainerCallback, ExportableState):
    """Puts what was trained into each checkpoint's `trainer_state.json`."""

    def __init__(self, rollouts: AsyncRollouts) -> None:
        self._rollouts = rollouts

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self._rollouts.saved()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            saved = (state.stateful_callbacks or {}).get(type(self).__name__, {}).get("attributes", {})
            self._rollouts.began(state.global_step, Path(args.output_dir), args.weight_sync_steps, saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._rollouts.stepped(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._rollouts.acknowledge()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Without checkpoints, what was trained is durable when training is over."""
        if state.is_world_process_zero:
            self._rollouts.acknowledge()


def _task_id(task: Task | Mapping[str, Any]) -> str:
    return task.task_id if isinstance(task, Task) else str(task.get("task_id", ""))
