"""What an agent-loop worker of verl has once, however many sessions it runs: the connection to the proxy, the inference worker
that lends it verl's model, and the runner of agents.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import uuid
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from transformers import AutoConfig, GenerationConfig

from steno.client.client import AsyncClient
from steno.contracts.errors import BadRequest, ConfigError, StenoError
from steno.contracts.records import Limits
from steno.contracts.rest import Completion, GroupTrials
from steno_adapters.verl import seam
from steno_adapters.verl.checks import check_config, context_tokens
from steno_adapters.verl.handed_over import HandedOver
from steno_adapters.verl.job import JobFacts, facts_of, job
from steno_adapters.verl.leftovers import end_leftovers, mark_ended, mark_running, own_folder
from steno_adapters.verl.prompt_groups import PromptGroup, PromptSession
from steno_adapters.verl.session_rows import SessionRows, training_rows, validation_rows
from steno_adapters.verl.settings import VerlSettings
from steno_adapters.verl.tokens import VerlFormat, VerlTokens
from steno_rollouts.build import CLIENT_RETRIES, Prepared
from steno_rollouts.outcome import EndReason, TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.play import DEFAULT_TIMEOUT_S, Assignment, ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)
SERVED_S = 300.0
"""How long the proxy may take until it serves this process' model."""
SPARE_S = 600.0
"""What `_deadline_s` adds to a trial's time for everything beside its agent and its reward."""
FAILED_REWARD = 0.0
"""The reward of a failed trial in validation: without the trial, the score would be better."""
_actors: list[Any] = []
"""Handles of the job's actor. The handle in the process that made the actor keeps it alive; handles found by name do not."""


@dataclass(frozen=True)
class PlayedSession:
    """A session that has ended, with what can be trained of it. reward: as verl is told; None: it failed."""

    result: TrialResult
    rows: SessionRows
    reward: float | None = None


async def job_facts(config: Any, settings: VerlSettings) -> JobFacts:
    """Of this job, whose actor is made now if it is not there yet: then it lives as long as this process.

    Raises: ConfigError: the proxy did not start, or has ended.
    """
    keys = [key.get_secret_value() if key is not None else None for key in (settings.key, settings.worker_key)]
    name = str(config.trainer.get("experiment_name", "verl"))
    try:
        actor = await asyncio.to_thread(job, name, settings.run, settings.proxy, *keys)
        facts = await asyncio.to_thread(facts_of, actor)
    except Exception as error:
        raise ConfigError(f"proxy: {error}", field="proxy") from error
    _actors.append(actor)
    return facts


class AgentHost:
    """Of one process; `AgentHost.begun` makes it."""

    def __init__(
        self, config: Any, settings: VerlSettings, prepared: Prepared, evaluated: Prepared, facts: JobFacts
    ) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._config, self._settings, self._facts = config, settings, facts
        self._client = AsyncClient(facts.proxy, facts.key, retries=CLIENT_RETRIES)
        self._limits = Limits(max_turns=settings.max_turns, max_tokens=settings.max_tokens)
        self._slots = asyncio.Semaphore(settings.in_flight)
        self._prepared = {False: prepared, True: evaluated}
        self._tasks = {side: {task.task_id: task for task in of.tasks} for side, of in self._prepared.items()}
        self._runners = {side: self._runner(of) for side, of in self._prepared.items()}
        self._handing_over = HandedOver(self._client, facts.run, facts.lineage, seam.unfinished)
        self._beside: list[asyncio.Task[Any]] = []
        self._worker: asyncio.Task[int] | None = None

    @classmethod
    async def begun(cls, config: Any, settings: VerlSettings, servers: Any, tokenizer: Any) -> AgentHost:
        """Raises: ConfigError: settings, tasks, or verl's configuration are not what they should be; the proxy is not there."""
        check_config(config, settings.branches)
        facts = await job_facts(config, settings)
        root = settings.work_dir.expanduser().absolute()
        settings = settings.in_job(facts.proxy, facts.key, own_folder(root))
        prepared = evaluated = await asyncio.to_thread(Prepared.of, settings, facts.run)
        if settings.eval_tasks is not None:
            others = settings.model_copy(update={"tasks": settings.eval_tasks})
            evaluated = await asyncio.to_thread(Prepared.of, others, facts.run)
        for warning in prepared.warnings:
            log.warning("%s", warning)
        host = cls(config, settings, prepared, evaluated, facts)
        try:
            await end_leftovers(root, prepared.executor(), host._client, settings.keeps)
            await host._start(servers, tokenizer)
        except BaseException:
            await host.close()
            raise
        return host

    async def close(self) -> None:
        """End what runs beside the sessions. Idempotent."""
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self._client.close()

    @property
    def fails_groups(self) -> bool:
        """Whether a session without rows makes verl's group fail."""
        return self._settings.on_failure == "fail_group"

    def task(self, name: str, *, validate: bool) -> Task:
        """Raises: BadRequest: there is no such task."""
        tasks = self._tasks[validate]
        if name not in tasks:
            some = ", ".join(sorted(tasks)[:5])
            raise BadRequest(
                f"extra_info.task_id: got {name!r}, must be one of the {len(tasks)} tasks of "
                f"{self._prepared[validate].settings.tasks or self._settings.harbor} ({some}, …)",
                field="extra_info.task_id",
            )
        return tasks[name]

    async def play(self, session: PromptSession) -> PlayedSession:
        """Run an agent to its end.

        Raises: ConfigError: the proxy takes no worker. StenoError: the proxy refuses, or is away for long.
        Whatever is raised, the trial is ended: as `cancelled` or `interrupted`, if the proxy is there.
        """
        results: list[TrialResult] = []
        try:
            async with self._slots:
                self._check_worker()
                assignment = await self._assignment(session)
                mark_running(self._settings.work_dir, assignment.trial_id)
                await self._runners[session.validate].run(assignment, results.append)
        except BaseException as error:
            if not results:
                reason = EndReason.CANCELLED if isinstance(error, asyncio.CancelledError) else EndReason.INTERRUPTED
                await asyncio.shield(self._abandon(session, reason))
            raise
        finally:
            if results:
                self._has_ended(session, results[0].trial_id)
        [result] = results
        if result.failed and not session.validate:
            return PlayedSession(result, SessionRows([]))
        rows = await self._rows(result.trial_id, session.validate)
        return PlayedSession(result, rows, FAILED_REWARD if result.reward is None else result.reward)

    async def end_rest(self, group: PromptGroup) -> None:
        """End the trials whose sessions failed before they could play them. For the last session that leaves its group."""
        for trial_id in group.not_ended():
            try:
                await self._client.complete(
                    trial_id, Completion(status="aborted", end_reason=EndReason.INTERRUPTED.value)
                )
            except StenoError as error:
                log.warning("trial %s: not ended, its group waits for its deadline: %s", trial_id, error.message)
            else:
                mark_ended(self._settings.work_dir, trial_id)

    def _runner(self, prepared: Prepared) -> TrialRunner:
        settings = prepared.settings
        options = RunnerOptions(
            command=prepared.command,
            work_dir=settings.work_dir,
            timeout_s=settings.timeout_s,
            timeout_reward=settings.timeout_reward,
            retries=settings.retries,
            keep=settings.keeps,
        )
        player = ExecutorPlayer(self._client, prepared.executor(), options, prepared.reward)
        return TrialRunner(self._client, player, options)

    async def _abandon(self, session: PromptSession, reason: EndReason) -> None:
        """End its trial, if there is one."""
        if not session.group.is_registered:
            return
        try:
            assignment = await self._assignment(session)
            await self._runners[session.validate].abandon(assignment, reason)
            self._has_ended(session, assignment.trial_id)
        except StenoError as error:
            log.warning("prompt %s: its trial was not ended: %s", session.uid, error.message)

    def _has_ended(self, session: PromptSession, trial_id: str) -> None:
        session.group.ended.add(session.index)
        mark_ended(self._settings.work_dir, trial_id)

    def _deadline_s(self, session: PromptSession) -> float:
        """The deadline of the session's group. Generous: it is for groups whose process was killed and can't end their trials.
        Trials begin in the order in which their sessions came, `in_flight` at a time."""
        settings = self._settings
        longest = settings.timeout_s or max(
            task.timeout_s or DEFAULT_TIMEOUT_S for tasks in self._tasks.values() for task in tasks.values()
        )
        waves = math.ceil(session.waiting / settings.in_flight) + 1
        trial_s = (settings.retries + 1) * (longest + settings.grace_s) + settings.reward_timeout_s + SPARE_S
        return 2 * waves * trial_s

    async def _assignment(self, session: PromptSession) -> Assignment:
        async def register(size: int) -> GroupTrials:
            facts, deadline_s = self._facts, self._deadline_s(session)
            return await self._client.create_group(
                session.group_spec(facts.run, facts.lineage, size, self._limits, deadline_s)
            )

        made = await session.group.registered(register)
        return Assignment(made.trials[session.index], session.task, "verl", made.harness_key)

    async def _rows(self, trial_id: str, validate: bool) -> SessionRows:
        samples = await self._client.samples(trial_id)
        lengths = {
            "prompt_length": int(self._rollout.prompt_length),
            "response_length": int(self._rollout.response_length),
        }
        if validate:
            return validation_rows(samples, **lengths)
        settings = self._settings
        found = training_rows(
            samples,
            lineage=self._facts.lineage,
            main_only=settings.branches == "main",
            models=settings.train_models,
            **lengths,
        )
        if found.untrained:
            log.info("trial %s: sampled and not trained: %s", trial_id, dict(found.untrained))
        return found

    def _check_worker(self) -> None:
        """Raises: ConfigError."""
        if self._worker is not None and self._worker.done():
            raise ConfigError(
                f"worker_key: the proxy at {self._facts.proxy} does not take this process as a worker (see its log)",
                field="worker_key",
            )

    async def _start(self, servers: Any, tokenizer: Any) -> None:
        name, lineage = self._settings.model_name, self._facts.lineage
        tokens, chat = await asyncio.to_thread(_engine, servers, tokenizer, self._config, name, lineage)
        await chat.start()
        settings = WorkerSettings(
            proxy=[self._facts.proxy],
            key=self._facts.worker_key,
            worker_id=f"{self._facts.lineage}-{uuid.uuid4().hex[:8]}",
            max_streams=4096,
        )
        worker = Worker(settings, chat, WorkerMetrics(CollectorRegistry()))
        tokens.changed = worker.announce
        self._worker = asyncio.create_task(worker.run(), name="steno-worker")
        self._beside = [self._worker, asyncio.create_task(self._handing_over.run(), name="steno-handed-over")]
        await self._served()

    async def _served(self) -> None:
        """Until the proxy has a worker of this job. Raises: ConfigError: it takes none. StenoError: it is not there."""
        name = self._settings.model_name
        try:
            async with asyncio.timeout(SERVED_S):
                while True:
                    self._check_worker()
                    if any(model.name == name for model in await self._client.models()):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ConfigError(
                f"proxy: {self._facts.proxy} does not serve the model {name} after {SERVED_S:.0f} s", field="proxy"
            ) from None


def _engine(servers: Any, tokenizer: Any, config: Any, name: str, lineage: str) -> tuple[VerlTokens, ChatEngine]:
    """Reads the model's tokenizer and configuration.

    Raises: ConfigError: it has no fast tokenizer, no template, or no configuration that can be read.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    try:
        files = seam.model_files(model)
        read = AutoConfig.from_pretrained(files, trust_remote_code=bool(model.get("trust_remote_code", False)))
    except (OSError, ValueError) as error:
        key = "actor_rollout_ref.model.path"
        raise ConfigError(f"{key}: got {model.path}, its configuration can't be read: {error}", field=key) from error
    try:
        eos = GenerationConfig.from_pretrained(files).eos_token_id
    except OSError:  # the file is optional
        eos = None
    stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
    context = context_tokens(rollout)
    # verl's own goes on being used by others, and a format turns off what would truncate.
    chat = VerlFormat(
        copy.deepcopy(tokenizer), config.data.get("apply_chat_template_kwargs") or {},
        name=name, stop_ids=stops, context_tokens=context,
    )  # fmt: skip
    width = int(read.get_text_config().vocab_size)
    tokens = VerlTokens(
        servers, name=name, lineage=lineage, context_tokens=context, vocabulary_size=max(width, chat.vocab_size),
        tokenizer_digest=chat.digest, stop_ids=chat.stop_ids, distinct=bool(rollout.get("full_determinism", False)),
        seed_name="sampling_seed" if rollout.name == "sglang" else "seed",
    )  # fmt: skip
    return tokens, ChatEngine(tokens, chat)
