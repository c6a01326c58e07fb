"""A worker's side of policy updates: runs each from `Prepare` to its end, and reports its state to the proxies.

    prep --stage--> receiving --all checked--> ready --apply--> loading --probe passed--> served
                       \\-------------\\----------------------------\\------> failed, until it is prepared again
                                                                               and the last good weights are loaded again

One update is staged at a time, while generation goes on; a newer one takes its place. Several proxies may send the same update:
it is staged once, and all of them get its progress. The cards name a version only after its probe has passed, and tokens sampled
meanwhile wait behind the gate (I10). Staging itself is `stage.py`, and loading is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from pydantic import ValidationError

from steno.config.object_store import ObjectStore
from steno.contracts.errors import BadRequest, EngineFailed, NotFound, StenoError, WeightsRefused
from steno.contracts.lenient import read_json
from steno.contracts.policy import PATCHES, Probe, UpdateSpec
from steno.contracts.wire.frames import Abandon, Apply, Chunk, Frame, ModelCard, Prepare
from steno_worker.interfaces import Engine, StagedUpdate
from steno_worker.metrics import WorkerMetrics
from steno_worker.weights.fixed import FixedWeights, refusal
from steno_worker.weights.gate import WeightsGate
from steno_worker.weights.patching import whole_spec
from steno_worker.weights.prove import check_ids, check_numbers, compare, score_in_time
from steno_worker.weights.proven_weights import ProvenWeights, base_update
from steno_worker.weights.shard_files import check_manifest
from steno_worker.weights.stage import Stager
from steno_worker.weights.staged_files import UpdateAbandoned
from steno_worker.weights.update_state import Send, UpdateStep, WeightUpdate

logger = logging.getLogger(__name__)
CLOSE_S = 10.0
ANY_IDS = list(range(8))
"""Ids that are scored if there is no probe: every vocabulary has them, and broken weights give NaN or infinity for any ids."""
Proof = tuple[str, str, Probe | None]
"""What decides whether weights pass: (version, digest, probe)."""


class UpdateRunner:
    """Runs the weight updates of one engine, for all proxies. Lives in one event loop.

    Args:
        announce: tells every proxy that cards or health have changed.
        staging_dir: None: a temporary folder, removed by `close`.
        objects: where the trainer's object store is; None: none is read.

    Attributes:
        healthy: False from when the loaded weights are found invalid until others have been proved; `reason` says why.
        gate: holds back what generations send while the loaded weights are not proved.
    """

    def __init__(
        self, engine: Engine, metrics: WorkerMetrics, *, announce: Callable[[], None],
        staging_dir: Path | None = None, objects: ObjectStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.healthy = True
        self.reason = ""
        self.gate = WeightsGate()
        self._engine = engine
        self._metrics = metrics
        self._announce = announce
        self._stager = Stager(metrics, staging_dir, objects)
        self._clock = clock
        self._updates: dict[str, WeightUpdate] = {}
        self._proved: str | None = None  # the version that cards name; None: as the engine says
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()  # each with its rollback; only `close` cancels one
        self._returning_to = ""  # the version that a rollback is loading now
        self._good: ProvenWeights | None = None  # the last proven weights; None: none are known yet
        self._refused: tuple[Proof, StenoError] | None = None  # the last weights whose probe failed, and how

    def cards(self) -> list[ModelCard]:
        """The engine's cards, with the version that was proved, and the capability PATCHES unless they are text only."""
        cards = [
            card if card.text_only else msgspec.structs.replace(card, capabilities=[*card.capabilities, PATCHES])
            for card in self._engine.cards()
        ]
        if self._proved is None:
            return cards
        return [msgspec.structs.replace(card, policy_version=self._proved) for card in cards]

    def handle(self, frame: Frame, send: Send) -> None:
        """Prepare, Chunk, Apply or Abandon, from the proxy that `send` leads to."""
        if isinstance(frame, Prepare):
            self._prepare(frame, send)
        elif isinstance(frame, Chunk):
            if (update := self._updates.get(frame.update_id)) is not None:
                update.listeners.add(send)
                update.arrived(frame, send)
        elif isinstance(frame, Apply):
            self._apply(frame, send)
        elif isinstance(frame, Abandon):
            update = self._updates.get(frame.update_id)
            if update is not None and update.step in (UpdateStep.RECEIVING, UpdateStep.READY):
                logger.info("update %s was abandoned", update.version)
                self._drop(update)

    def forget(self, send: Send) -> None:
        """This proxy's channel is over. What it asked for goes on: it, or another, will ask again."""
        for update in self._updates.values():
            update.listeners.discard(send)

    async def close(self) -> None:
        """Stop staging, give a load under way CLOSE_S, remove what is temporary."""
        for update in list(self._updates.values()):
            update.abandoned.set()
            if update.task is not None:
                update.task.cancel()
        tasks = [*self._loads, *(update.task for update in self._updates.values() if update.task is not None)]
        if tasks:
            for late in (await asyncio.wait(tasks, timeout=CLOSE_S))[1]:
                late.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._stager.close()

    # -- what proxies ask

    def _prepare(self, frame: Prepare, send: Send) -> None:
        update = self._updates.get(frame.update_id)
        if update is not None and update.step is not UpdateStep.FAILED:
            update.listeners.add(send)
            update.report_to(send)
            return
        try:
            spec = read_json(UpdateSpec, frame.spec)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            send(WeightUpdate.refusal(frame.update_id, BadRequest(f"spec.{where}: {first['msg']}")))
            return
        listeners = update.listeners if update is not None else set()
        is_sound = self.healthy or self._returning_to
        if is_sound and self._refused is not None and self._refused[0] == _proof_of(spec):
            # The same weights and the same probe would fail again, and the generations that run here would lose their tokens
            # again. This holds too if the weights come in another way (as a full copy, after patches).
            send(WeightUpdate.refusal(frame.update_id, self._refused[1]))
            return
        update = self._updates[frame.update_id] = WeightUpdate(frame.update_id, spec, {*listeners, send})
        try:
            is_served = self._is_served(update)
            self._make_way(update)
        except StenoError as error:
            self._failed(update, error)
            return
        if is_served:
            update.move(UpdateStep.SERVED)  # under another id: a proxy that had forgotten it
        else:
            update.task = asyncio.create_task(self._stage(update), name=f"stage {update.version}")

    def _is_served(self, update: WeightUpdate) -> bool:
        """Whether its weights are loaded and proved. Raises: WeightsRefused: other weights of its version are."""
        if update.version != self._proved or not self.healthy:
            return False
        if self._good is not None and self._good.digest is not None:
            update.check_digest(self._good.digest)
        return True

    def _make_way(self, update: WeightUpdate) -> None:
        """Check an update, then drop those before it that are not being loaded or served: only one is staged at a time.

        Raises: WeightsRefused: a newer update is here already; the weights are not for this worker.
        """
        spec, cards = update.spec, self._engine.cards()
        check_manifest(spec.manifest)
        policies = sorted({card.policy for card in cards})
        if spec.policy not in policies:
            raise WeightsRefused(
                f"policy: got {spec.policy!r}, this worker serves {', '.join(policies)}", field="policy"
            )
        if spec.probe is not None and len(spec.probe.logprobs) != len(spec.probe.token_ids) - 1:
            raise WeightsRefused(
                "probe.logprobs: must have one entry less than probe.token_ids", field="probe.logprobs"
            )
        if isinstance(self._engine, FixedWeights):
            raise refusal()
        for card in cards:
            if spec.probe is not None and card.policy == spec.policy and not card.synthetic:
                check_ids(spec.probe, card)
        for other in list(self._updates.values()):
            if other is update:
                continue
            if other.step is UpdateStep.FAILED:
                continue
            if other.spec.lineage == spec.lineage and other.spec.step > spec.step:
                raise WeightsRefused(f"step: superseded by {other.version}", field="step")
            if other.version == spec.version:
                update.check_digest(other.digest)
        for other in list(self._updates.values()):
            if other is update or other.step is UpdateStep.LOADING:
                continue
            if other.step in (UpdateStep.RECEIVING, UpdateStep.READY):
                self._failed(other, WeightsRefused(f"step: superseded by {spec.version}", field="step"))
            if other.step is not UpdateStep.SERVED or other.version != self._proved:
                self._drop(other)

    def _apply(self, frame: Apply, send: Send) -> None:
        update = self._updates.get(frame.update_id)
        if update is None:
            send(WeightUpdate.refusal(frame.update_id, NotFound("apply: this worker has not prepared this update")))
            return
        update.listeners.add(send)
        if update.step is UpdateStep.READY:
            update.move(UpdateStep.LOADING)
            load = asyncio.create_task(self._load(update), name=f"load {update.version}")
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        else:
            update.report_to(send)

    # -- staging

    async def _stage(self, update: WeightUpdate) -> None:
        try:
            if update.version == self._returning_to:  # then its weights are here already, unless that fails
                async with self._loading:
                    pass
            if self._is_served(update):
                update.move(UpdateStep.SERVED)
                return
            folder = await self._stager.stage(update)
            update.staged = StagedUpdate(update.id, whole_spec(update.spec), folder)
            logger.info("update %s is staged: %d bytes", update.version, update.received)
            update.move(UpdateStep.READY)
        except UpdateAbandoned:
            return
        except StenoError as error:
            self._failed(update, error)
        except Exception as error:  # recorded: the update has failed, and the log has its traceback
            logger.exception("update %s could not be staged", update.version)
            self._failed(update, WeightsRefused(f"staging failed: {type(error).__name__}: {error}"))

    # -- loading

    async def _load(self, update: WeightUpdate) -> None:
        assert update.staged is not None
        started = self._clock()
        async with self._loading:
            try:
                if self._is_served(update):  # gone back to while this was staged
                    self._serve(update)
                    return
            except WeightsRefused as error:
                self._failed(update, error)
                return
            self._proved = self._proved or self._engine.cards()[0].policy_version
            if self._good is None and self.healthy:  # unhealthy: the loaded weights are not those of the named version
                self._good = await self._base(update.spec)
            if self.healthy:
                self.gate.close(update.version)
            loaded = False
            try:
                update.pause_s = await self._engine.load_weights(update.staged)
                loaded = True
                self.gate.close(update.version)
                scored = await self._prove(update.spec.probe, update.spec.deadline_s)
            except WeightsRefused as error:
                self._failed(update, error)
                if loaded:
                    self._refused = _proof_of(update.spec), error
                if loaded or not self.healthy:
                    self._condemn(error.message)
                else:
                    self.gate.open()
            except StenoError as error:
                self._failed(update, error)
                self._condemn(error.message)
            except Exception as error:  # recorded: the update has failed, and the log has its traceback
                logger.exception("update %s could not be loaded", update.version)
                failure = EngineFailed(f"loading failed: {type(error).__name__}: {error}")
                self._failed(update, failure)
                self._condemn(failure.message)
            else:
                update.load_s = self._clock() - started
                self.gate.open()
                self._good = ProvenWeights(update.staged, scored)
                self._stager.keep(update)
                self._serve(update)
            if not self.healthy:
                await self._go_back()

    async def _prove(self, probe: Probe | None, timeout_s: float) -> Probe | None:
        """Check that the loaded weights give the probe's log-probabilities; without a probe, that they give finite ones.

        Returns: the probe with this engine's log-probabilities, or None. Raises: WeightsRefused: the weights fail; EngineFailed:
        also if the engine does not answer within `timeout_s`.
        """
        if all(card.synthetic for card in self._engine.cards()):
            return None
        if probe is None:
            check_numbers(await score_in_time(self._engine, ANY_IDS, timeout_s))
            return None
        scores = await score_in_time(self._engine, probe.token_ids, timeout_s)
        distance = compare(probe, scores)
        logger.info(
            "the probe passed: log-probabilities differ by %.4g on average, %.4g at the 90th percentile, %.4g at most",
            *distance,
        )
        return probe.model_copy(update={"logprobs": scores})

    async def _base(self, spec: UpdateSpec) -> ProvenWeights | None:
        """The weights that the engine was started from, with its own log-probabilities for the first update's probe. None: they
        can't be loaded again, or the engine does not answer within half of `deadline_s` (the rest is for the update itself)."""
        try:
            folder, probe = self._engine.checkpoint(), spec.probe
            staged = base_update(folder, self._engine.cards()[0]) if folder is not None else None
            if staged is None:
                return None
            if probe is not None:
                scores = await score_in_time(self._engine, probe.token_ids, spec.deadline_s / 2)
                probe = probe.model_copy(update={"logprobs": scores})
        except Exception as error:  # an update is loaded without a way back, too
            logger.warning("the weights that this worker was started with can't be probed: %r", error)
            return None
        return ProvenWeights(staged, probe)

    async def _go_back(self) -> None:
        """Load the last proven weights and prove them again, so that agents are served. If that fails, this worker generates
        nothing until other weights come."""
        good = self._good
        if good is None or good.staged.spec.transport == "nccl":
            why = "nccl leaves no copy of the weights" if good is not None else "there is no copy of the weights"
            logger.error("this worker can't roll back to %s: %s", self._proved, why)
            return
        version = self._returning_to = good.staged.version
        try:
            # The KV cache of the invalid weights is never kept, whatever `kv` the update to the good weights had.
            spec = good.staged.spec.model_copy(update={"kv": "recompute"})
            await self._engine.load_weights(replace(good.staged, spec=spec))
            await self._prove(good.scored, spec.deadline_s)
        except StenoError as error:
            logger.error("this worker can't roll back to %s: %s", version, error.message)
            return
        except Exception:  # recorded: it stays as it is, not well
            logger.exception("this worker can't roll back to %s", version)
            return
        finally:
            self._returning_to = ""
        self.gate.open()
        self._proved, self.healthy, self.reason = version, True, ""
        self._metrics.weights_proved.set(1)
        self._metrics.updates.labels("gone_back").inc()
        logger.warning("rolled back to %s, which this worker serves again", version)
        self._announce()

    def _serve(self, update: WeightUpdate) -> None:
        self._proved = update.version
        self.healthy, self.reason = True, ""
        self._metrics.weights_proved.set(1)
        self._metrics.updates.labels("served").inc()
        self._metrics.update_pause.observe(update.pause_s)
        self._metrics.update_load.observe(update.load_s)
        logger.info(
            "serves %s: sampling paused for %.3f s, %.3f s from apply to serving",
            update.version,
            update.pause_s,
            update.load_s,
        )
        self._announce()
        update.move(UpdateStep.SERVED)
        self._clear(update)

    def _condemn(self, reason: str) -> None:
        """The weights now loaded are not those of any version: nobody may be given tokens of theirs."""
        self.healthy, self.reason = False, reason
        self._metrics.weights_proved.set(0)
        logger.error("the loaded weights are invalid: %s", reason)
        for update in list(self._updates.values()):
            if update.step is UpdateStep.SERVED:
                self._drop(update)
        self.gate.condemn(reason)
        self._announce()

    # -- ends

    def _failed(self, update: WeightUpdate, error: StenoError) -> None:
        if update.step is UpdateStep.FAILED:
            return
        logger.warning("update %s failed: %s", update.version, error.message)
        self._metrics.updates.labels(error.code).inc()
        update.abandoned.set()
        update.error = error
        update.move(UpdateStep.FAILED)
        self._clear(update)

    def _drop(self, update: WeightUpdate) -> None:
        """Forget an update, and remove what was staged for it. If it is being loaded, the load goes on, with its rollback."""
        del self._updates[update.id]
        update.abandoned.set()
        if update.task is not None:
            update.task.cancel()
        self._clear(update)

    def _clear(self, update: WeightUpdate) -> None:
        """What is staged is no longer needed: its tensors are in the engine, or never will be."""
        self._stager.remove(update)
        update.forget_bytes()


def _proof_of(spec: UpdateSpec) -> Proof:
    return spec.version, spec.manifest.digest, spec.probe
