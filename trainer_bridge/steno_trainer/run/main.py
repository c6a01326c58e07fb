"""`steno train`: the same program on every rank. The first one runs the loop, the others follow it.

Wires and nothing else: which parts there are and in which order they are opened and closed. A rank that fails ends its process,
so that the launcher ends the others; nothing is waited for that can't come any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch
from rich.console import Console

from steno.client.client import AsyncClient, Client
from steno.config.object_store import ObjectStore
from steno.contracts.errors import ConfigError, StenoError, Superseded
from steno.contracts.runs.leases import Lease
from steno_rollouts.build import CLIENT_RETRIES, Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.evaluation import Evaluator, greedy
from steno_trainer.checkpoints.checkpoint import Checkpoints, RunState
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.own_estimator import estimator_named
from steno_trainer.data.record_feed import RecordFeed
from steno_trainer.data.record_file import RecordFile
from steno_trainer.data.staleness import FIRST, PolicyVersion, VersionHistory
from steno_trainer.distributed.collective_calls import CollectiveCalls
from steno_trainer.distributed.ranks import Ranks, is_launched
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.objective.own import objective_named
from steno_trainer.reporting.console import ConsoleView
from steno_trainer.reporting.step_posts import StepPosts
from steno_trainer.reporting.trackers import (
    Prometheus,
    TensorBoard,
    Tracker,
    Trackers,
    WeightsAndBiases,
    check_installed,
)
from steno_trainer.run.folders import alone_in, claim_folders, look_at_folders, look_at_numbers
from steno_trainer.run.loop import Loop, SampleLimits
from steno_trainer.run.tenure import LEAVE_S, TenureHolder
from steno_trainer.run.training_state import TrainingState
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import says_something
from steno_trainer.step.scoring import PolicyProbe
from steno_trainer.step.step import Stepper
from steno_trainer.weights.adapters import AdapterWeights, adapter_entry, weights_of
from steno_trainer.weights.exchange import beside_first
from steno_trainer.weights.files.copies import WeightsCopies
from steno_trainer.weights.files.differences import WeightsDifferences, patch_takers
from steno_trainer.weights.nccl.address import meeting_address
from steno_trainer.weights.object_weights import ObjectPlace, ObjectTransport
from steno_trainer.weights.probe import ProbeTolerance
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.transports import FilesystemTransport, StreamTransport, Transport

logger = logging.getLogger(__name__)


POSTS_S = 5.0
"""How long a trainer, at its end, waits until its last steps are posted to the proxy."""


def train(settings: RunSettings) -> None:
    """Run this rank to its end. Raises: ConfigError; TrainerAlive, Superseded: another trainer has the run; StenoError: what
    ended it."""
    check_beforehand(settings)
    if _is_first():
        look_at_folders(settings)
    ranks = Ranks.open(
        settings.device, sequence_size=settings.sequence_parallel, wait_s=settings.wait_timeout_s,
        collective_s=settings.collective_timeout_s,
    )  # fmt: skip
    # Every start is a lineage of its own: a version that a killed trainer pushed and did not save is never given again (I10).
    lineage = secrets.token_hex(4) if ranks.first else None
    with _hold(settings, ranks, lineage) as tenure:
        if not (lineage := ranks.share(lineage.encode() if lineage is not None else None).decode()):
            return
        engine = PolicyEngine.open(settings, ranks)
        duties = RankDuties(settings, engine, lineage, tenure.epoch if tenure is not None else None)
        calls = CollectiveCalls(ranks, duties.table())
        lost: Superseded | None = None
        if tenure is not None:
            lost = asyncio.run(_lead(settings, engine, calls, duties, tenure))
        else:
            _leave_signals_to_the_first()
            calls.follow()
        duties.close()
        ranks.barrier()
        ranks.close()
        if lost is not None:
            raise lost


def check_beforehand(settings: RunSettings) -> None:
    """What would otherwise be missed only once the model is loaded.

    Raises: ConfigError: a combination that can't be, an objective or estimator of a user's that is none, a tracker that is not
        installed or whose files can't be written, an evaluation whose tasks, command or reward function are not what they should
        be, a file of records with a row that is none; as `is_launched`.
    """
    settings.check()
    if settings.weights_url is not None:
        ObjectStore(settings.weights_url, "weights_url")  # looks whether its package is installed
    objective_named(settings.objective)
    if not _is_first():
        return
    if not settings.imitates:
        estimator_named(settings.estimator)
    for warning in settings.idle():
        logger.warning("%s", warning)
    check_installed(settings)
    look_at_numbers(settings)
    if settings.eval_config is not None:
        _prepared_evaluation(settings, settings.eval_config)
    if settings.records is not None:
        with contextlib.closing(RecordFile.open(settings.records)) as records:
            records.check(settings.train_models, settings.policy)
    if settings.push == "adapter" and not Path(settings.model).is_dir():
        raise ConfigError(f"model: got {settings.model}; with push: adapter it must be a folder", field="model")


def _is_first() -> bool:
    """As launchers number ranks: the first one has trackers and evaluates. Raises: ConfigError: as `is_launched`."""
    return not is_launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def _hold(settings: RunSettings, ranks: Ranks, lineage: str | None) -> Iterator[TenureHolder | None]:
    """On the first rank: take over the run, before the model and the checkpoint are loaded, and hold it inside this context. If
    that fails, the other ranks are told to end without an error, so that the launcher reports this rank's. On them: None."""
    if lineage is None:
        yield None
        return
    with Client(settings.proxy, settings.key, retries=0, timeout_s=LEAVE_S) as client, contextlib.ExitStack() as held:
        try:
            tenure = held.enter_context(_tenure(settings, client, consumer_of(lineage)))
            _check_meeting(client, settings)
            if tenure.epoch is None:  # no proxy keeps another trainer away
                held.enter_context(alone_in(settings.checkpoint_dir, settings.run, tenure.trainer))
        except StenoError:
            ranks.share(b"")
            raise
        yield tenure


def _tenure(settings: RunSettings, client: Client, trainer: str) -> TenureHolder:
    """Raises: StenoError: as `TenureHolder.take`."""
    if settings.records is not None:  # no proxy is asked
        return TenureHolder(client, settings.run, trainer, None)
    return TenureHolder.take(
        client, settings.run, trainer, force=settings.take_over,
        known=Lineages(settings.checkpoint_dir, settings.run).newest_epoch(), patience_s=settings.push_deadline_s,
    )  # fmt: skip


def _check_meeting(client: Client, settings: RunSettings) -> None:
    """Before the model is loaded. Raises: ConfigError: workers that there are now can't meet this machine over NCCL."""
    if settings.transport == "nccl" and not settings.is_offline:
        meeting_address(client.workers(), settings.proxy, settings.nccl_address)


def consumer_of(lineage: str) -> str:
    """What this start of a trainer is called to operators and to the proxy."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
    return f"{host}-{lineage}"


class RankDuties:
    """What all ranks do together. The same object on every rank; only the first one's is given arguments."""

    def __init__(self, settings: RunSettings, engine: PolicyEngine, lineage: str, epoch: int | None) -> None:
        self._settings, self._engine, self._ranks = settings, engine, engine.ranks
        self._stepper = Stepper(engine)
        tolerance = ProbeTolerance.of(settings.probe_precision, settings.probe_tolerance)
        self._probe = PolicyProbe(engine, tokens=settings.probe_tokens, tolerance=tolerance)
        self._lineages = Lineages(settings.checkpoint_dir, settings.run)
        self._checkpoints = Checkpoints(
            settings.checkpoint_dir, self._stepper, keep=settings.checkpoints_kept, lineages=self._lineages
        )
        saved = self._checkpoints.resume(settings.run)
        self.state = (
            TrainingState.of(saved)
            if saved is not None
            else TrainingState(settings.run, VersionHistory((PolicyVersion(FIRST, 0),)))
        )
        self._parent = self.state.version
        self.state.history = self.state.history.resumed(lineage)
        if self._ranks.first:
            claim_folders(settings)  # here nothing of the start is left that could refuse it
            self._lineages.begin(lineage, self._parent, epoch)
            self.state.history = self.state.history.knowing(self._lineages.others())
        self._publisher: Publisher | None = None
        if not settings.is_offline:
            self._publisher = Publisher(
                self._transport(), [AsyncClient(settings.proxy, settings.key, retries=CLIENT_RETRIES, epoch=epoch)],
                ranks=self._ranks, policy=settings.policy, run_id=settings.run, kv=settings.kv,
                deadline_s=settings.push_deadline_s, takes_patches=self._takes_patches(),
            )  # fmt: skip

    def table(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "step": self._stepper.step, "publish": self._publish, "save": self._save,
            "save_sparing": partial(self._save, spare=True),
        }  # fmt: skip

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self, version: PolicyVersion | None) -> Publication:
        assert self._publisher is not None  # offline nothing is published
        told = self._ranks.share(str(version).encode() if version is not None else None)
        probe = self._probe.make()
        dtype = getattr(torch, self._settings.send_dtype) if self._settings.send_dtype else None
        alone = self._settings.push == "adapter"
        source = AdapterWeights(self._engine.lm, dtype=dtype) if alone else weights_of(self._engine.lm, dtype)
        pushed = PolicyVersion.parse(told.decode())
        if self._ranks.first:
            self._lineages.pushing(pushed)
        publication = self._publisher.publish(pushed, source, probe, parent=self._parent)
        if self._ranks.first and pushed.step == self._parent.step:
            self._lineages.handed_over(publication.spec.manifest.digest)
            self.state.history = self.state.history.knowing(self._lineages.others())
        return publication

    def _save(self, state: TrainingState | None, *, spare: bool = False) -> None:
        told = self._ranks.share(msgspec.msgpack.encode(state.saved()) if state is not None else None)
        self._checkpoints.save(msgspec.msgpack.decode(told, type=RunState), spare=spare)

    def _transport(self) -> Transport:
        settings = self._settings
        if settings.transport == "nccl":
            from steno_trainer.weights.nccl.transport import NcclTransport, workers_of

            steno = Client(settings.proxy, settings.key)
            return NcclTransport(
                self._ranks, workers_of(steno, settings.policy), processes=settings.nccl_processes,
                address=lambda: meeting_address(steno.workers(), settings.proxy, settings.nccl_address),
                deadline_s=settings.push_deadline_s,
            )  # fmt: skip
        if settings.weights_url is not None:
            place = ObjectPlace(ObjectStore(settings.weights_url, "weights_url"), settings.run, settings.policy)
            return ObjectTransport(self._copies(beside_first(self._ranks)), place, ranks=self._ranks)
        if settings.transport == "stream":
            return StreamTransport(self._copies(beside_first(self._ranks)))
        copies = self._copies(None)
        seen_as = settings.weights_dir_at_workers
        return FilesystemTransport(copies, seen_as=PurePosixPath(seen_as) if seen_as else None)

    def _copies(self, writers: list[int] | None) -> WeightsCopies:
        settings = self._settings
        if settings.push == "full":
            return WeightsCopies(settings.weights_dir, ranks=self._ranks, writers=writers)
        if settings.push == "adapter":
            entry = adapter_entry(self._engine.lm, Path(settings.model)) if self._ranks.first else None
            return WeightsCopies(settings.weights_dir, ranks=self._ranks, writers=writers, adapter=entry)
        return WeightsDifferences(
            settings.weights_dir, full_every=settings.push_full_every, ranks=self._ranks, writers=writers
        )

    def _takes_patches(self) -> Callable[[], bool]:
        if self._settings.push != "delta":
            return lambda: False  # nobody asks
        return patch_takers(Client(self._settings.proxy, self._settings.key, retries=0), self._settings.policy)


def _leave_signals_to_the_first() -> None:
    """Launchers pass SIGTERM, and terminals Ctrl-C, to all ranks: one that ended at once would take the last checkpoint with it,
    which all ranks write together. What the first one decides is heard in `follow`; if it died, its sockets close."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


async def _lead(
    settings: RunSettings, engine: PolicyEngine, calls: CollectiveCalls, duties: RankDuties, tenure: TenureHolder
) -> Superseded | None:
    """The first rank's part. Returns: that another trainer has taken over; then all ranks end as after any other run, so that
    what their launcher is told is this rank's exit code."""
    state = duties.state
    trackers = Trackers(_trackers(settings))
    limits = SampleLimits(engine.vocabulary, engine.context_tokens, engine.common.lacking)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(trackers.close)
        client = await stack.enter_async_context(
            AsyncClient(settings.proxy, settings.key, retries=CLIENT_RETRIES, epoch=tenure.epoch)
        )
        evaluator = await _evaluator(settings, stack)
        counts: Callable[[Lease], bool] = (
            partial(says_something, estimator=estimator_named(settings.estimator, settings.gdpo_weights))
            if settings.dynamic_sampling
            else lambda lease: True
        )
        feed: LeaseFeed | RecordFeed
        if settings.records is not None:
            feed = RecordFeed(settings.records, run_id=settings.run, trained=state.trained, counts=counts)
        else:
            feed = LeaseFeed(
                client, run_id=settings.run, consumer=tenure.trainer, ahead=settings.groups_per_step,
                trained=state.trained, acknowledged=state.acknowledged, ttl_s=settings.lease_ttl_s, counts=counts,
            )  # fmt: skip
        view = stack.enter_context(ConsoleView(Console(stderr=True), run=settings.run, steps=settings.total_steps))
        status = feed if isinstance(feed, RecordFeed) else client
        posts = None
        if settings.records is None:  # else there is no proxy
            posts = StepPosts(client, settings.run)
            stack.push_async_callback(posts.close, POSTS_S)
        loop = Loop(
            settings, calls, feed, state, limits, trackers=trackers, view=view, status=status, evaluator=evaluator,
            posts=posts,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, loop.stop)
        here = asyncio.get_running_loop()
        tenure.on_lost(lambda error: here.call_soon_threadsafe(loop.fail, error))
        lost = None
        try:
            await loop.run()
        except Superseded as error:  # between two duties: the others listen
            lost = error
        await calls.dismiss()
        return lost


def _prepared_evaluation(settings: RunSettings, file: Path) -> Prepared:
    given = {"proxy": settings.proxy, "run": settings.run}
    found = _with_key(RolloutSettings.load(given, file), settings)
    if found.verifiers is not None:  # its tasks' own code would run in the trainer
        raise ConfigError(
            f"eval_config: {file}: verifiers: use `steno evaluate --verifiers` instead", field="eval_config"
        )
    return greedy(Prepared.of(found, settings.run))


def _with_key(found: RolloutSettings, settings: RunSettings) -> RolloutSettings:
    """The evaluation's settings, with the trainer's key unless they have one: both ask the same proxy. The file that the key is
    from is hidden from trials, as their own would be."""
    if (found.key is not None and "key" in found.model_fields_set) or settings.key is None:
        return found
    place = settings.secret_files.get("key", settings.file)
    if place is None:
        return found.model_copy(update={"key": settings.key})
    return found.with_secrets({"key": (settings.key.get_secret_value(), place)})


async def _evaluator(settings: RunSettings, stack: contextlib.AsyncExitStack) -> Evaluator | None:
    if settings.eval_config is None or settings.eval_every is None:
        return None
    prepared = _prepared_evaluation(settings, settings.eval_config)
    for warning in prepared.warnings:
        logger.warning("evaluation: %s", warning)
    client = await stack.enter_async_context(prepared.client())
    return Evaluator(prepared.rollouts(client), prepared.tasks, settings.eval_every, settings.report_by)


def _trackers(settings: RunSettings) -> list[Tracker]:
    trackers: list[Tracker] = []
    if settings.metrics_port is not None:
        prometheus = Prometheus(settings.metrics_port, settings.metrics_host)
        logger.info("metrics on http://%s:%d/metrics", settings.metrics_host, prometheus.port)
        trackers.append(prometheus)
    if settings.tensorboard_dir is not None:
        trackers.append(TensorBoard(settings.tensorboard_dir))
    if settings.wandb_project is not None:
        trackers.append(
            WeightsAndBiases(
                settings.wandb_project, run_id=settings.run, mode=settings.wandb_mode, folder=settings.wandb_dir,
                config=settings.resolved(),
            )
        )  # fmt: skip
    return trackers
