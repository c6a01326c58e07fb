"""Runs agents and gives what was recorded, group by group: `Collector`.

Groups are leased from the proxy: a group that is neither acknowledged nor released is held for this process while it lives, and
is served again, whole, soon after it has died. So acknowledge a group once the step that used it would survive you.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr

from steno import AsyncClient, Client, LeaseRequest, Limits, SamplingPolicy, StenoError
from steno.contracts.errors import BadRequest, ConfigError
from steno.contracts.policy import Update
from steno.contracts.runs.leases import MOST_LEASES, Lease
from steno.contracts.runs.train_models import checked
from steno_adapters.collected_group import Branches, CollectedGroup, read_group
from steno_adapters.event_loop import LoopTask, started_loop
from steno_adapters.function_agents import AgentFunction, FunctionAgents
from steno_adapters.last_failures import LastFailures
from steno_rollouts.build import CLIENT_RETRIES, Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.admission import Admission
from steno_rollouts.groups.plan import GroupOptions, Planned
from steno_rollouts.harness import Rollouts
from steno_rollouts.tasks.task import Task, divided, group_id
from steno_rollouts.trials.executor import Executor
from steno_rollouts.trials.play import ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner

log = logging.getLogger(__name__)

EXTENDED_AT_ONCE = 16
"""How many leases are extended at the same time."""
CLOSE_S = 30.0
"""How long `close` waits until running trials have been ended."""


class Collector:
    """Of one run. Blocking; safe to share between threads. `close`, or `with`, ends agents that run and gives leases back."""

    def __init__(
        self,
        proxy: str,
        run: str,
        *,
        agent: AgentFunction | RolloutSettings | None = None,
        key: str | None = None,
        in_flight: int = 8,
        temperature: float | None = 1.0,
        limits: Limits | None = None,
        timeout_s: float = 3600.0,
        policy: str = "default",
        train_models: Sequence[str] = (),
        lease_ttl_s: float = 60.0,
    ) -> None:
        """
        Args:
            proxy: its URL. run: what the groups are registered under; groups of an earlier start with this name are served too.
            agent: a function that plays a trial, called in threads; or the settings of `steno rollout`, whose command, executor,
                reward and confinement are used. None: agents are run by somebody else (`steno rollout --run …`).
            key: an admin key: pushing weights asks for one. in_flight, timeout_s, temperature, limits: of function agents; with
                settings, theirs count (`in_flight`, `timeout_s`, `sampling`, `max_turns`, `max_tokens`).
            temperature: forced on every request, as is top_p 1. None: the agents' own.
            train_models: calls that are trained, by the model name that the agent asked for, with * and ?; none: all of the
                policy's.
            lease_ttl_s: so long after this process has died, what it held is served again.

        Raises: ConfigError: names what can't be.
        """
        if isinstance(agent, RolloutSettings) and agent.verifiers is not None:
            raise ConfigError(
                "verifiers: can't be given here: run `steno rollout --verifiers` beside it", field="verifiers"
            )
        if isinstance(agent, RolloutSettings) and agent.spare_trials:
            raise ConfigError(
                "spare_trials: can't be given here: a trainer that asks for n trials has places for n",
                field="spare_trials",
            )
        self.run, self.policy, self._train_models = run, policy, checked(train_models)
        self._proxy, self._key = proxy, key
        self._client = Client(proxy, key, retries=CLIENT_RETRIES)
        self._ttl_s = lease_ttl_s
        self._held: dict[str, Lease] = {}
        self._telling: set[str] = set()  # leases of which the proxy is being told something by their users
        self._lock = threading.RLock()  # a signal's handler may close this where its thread has it
        self._closing = threading.Event()
        self._failures = LastFailures()
        self._mine: set[str] = set()
        self._collected: list[CollectedGroup] = []
        self._groups_run = run
        self._round, self._name = 0, uuid.uuid4().hex[:8]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rolling: list[LoopTask] = []
        self._work = tempfile.TemporaryDirectory(prefix="steno-collector-")
        law = {} if temperature is None else {"temperature": temperature, "top_p": 1.0}
        self._options = GroupOptions(
            run, size=1, in_flight=in_flight, sampling=SamplingPolicy(force=law), limits=limits or Limits(),
            resumable=False,
        )  # fmt: skip
        self._timeout_s = timeout_s
        self._prepared = _prepared(agent, run, key) if isinstance(agent, RolloutSettings) else None
        function = agent if callable(agent) else None
        self._executor = FunctionAgents(function) if function is not None else None
        threading.Thread(target=self._keep, name="steno-leases", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> Client:
        """For what is not here."""
        return self._client

    @property
    def failures(self) -> list[str]:
        """Why trials that were run here failed, a line for each of the last ones."""
        return list(self._failures.said)

    @property
    def tasks(self) -> list[Task]:
        """Of the settings. Raises: BadRequest: there are none."""
        if self._prepared is None:
            raise BadRequest("agent: must be RolloutSettings: only these have tasks", field="agent")
        return self._prepared.tasks

    # -- groups ---------------------------------------------------------------------------------------------------------------

    def of_rank(self, rank: int) -> None:
        """One of several processes that collect for one run, before its first group. Each has groups in a run of its own, `RUN`,
        `RUN-r1`, `RUN-r2`, …, so that none leases those of another. Weights are pushed for `RUN`."""
        if rank == 0:
            return
        self._groups_run = f"{self.run}-r{rank}"
        self._options = replace(self._options, run_id=self._groups_run)
        if self._prepared is not None:
            self._prepared = replace(self._prepared, run_id=self._groups_run)

    def collect(
        self, tasks: Iterable[Task | Mapping[str, Any]], n: int, *, branches: Branches = "all"
    ) -> list[CollectedGroup]:
        """Run `n` trials of each task to their end, and lease every group of the run that is ready: those of an earlier start
        that were not acknowledged come first. A group in which no trial came to a reward is not among them. What was leased
        before an error comes with the next call.

        Args: tasks: of `steno_rollouts.tasks.task.load_tasks`, or their fields, each with a `task_id`; those that begin with `_`,
            and `hide` of the settings, are withheld from commands as there. branches: as `lease`.
        Raises: BadRequest: no agent; a task without an id, or two with one; this is closed. StenoError: the proxy refuses or is
            away for long. CancelledError (of `concurrent.futures`): this was closed meanwhile. KeyboardInterrupt and the like:
            trials that run have been ended as `cancelled`, and nothing is leased.
        """
        self._start(tasks, n, Admission()).result()
        with self._lock:
            groups = [group for group in self._collected if group.lease.lease_id in self._held]
            self._collected = []
        try:
            while found := self.lease(MOST_LEASES, branches=branches):
                groups += found
        except BaseException:
            with self._lock:
                self._collected += groups
            raise
        return groups

    def start(
        self, tasks: Iterable[Task | Mapping[str, Any]], n: int, *, groups_per_step: int, max_staleness_steps: int
    ) -> Future[Any]:
        """Run groups in the background, no more than a trainer that takes `groups_per_step` per step can use before they are
        older than `max_staleness_steps`. Cancel the future to end them. What a start of this run that was killed had begun is
        gone on with: the same tasks in the same order have the same groups. tasks: may be endless; an id may come again.
        Raises: BadRequest: no agent; this is closed. The future has what `collect` raises."""
        return self._start(tasks, n, Admission(groups_per_step, max_staleness_steps), again=True).future

    def lease(self, max_groups: int = 1, wait_s: float = 0.0, *, branches: Branches = "all") -> list[CollectedGroup]:
        """Lease ready groups, the oldest first: `max_groups`, or as many as are ready after `wait_s` seconds (60 at most).

        Args: branches: of a trial that forked: all have rows, or `main`: the one with the most sampled tokens, whole.
        Raises: BadRequest: this is closed. StenoError. CancelledError (of `concurrent.futures`): this was closed meanwhile.
        """
        self._check_open()
        request = LeaseRequest(
            run_id=self._groups_run, consumer=f"adapter-{self._name}", max_groups=max_groups, wait_s=wait_s, ttl_s=self._ttl_s
        )  # fmt: skip
        leases: list[Lease] = []
        try:
            leases = self._client.lease(request)
            with self._lock:
                self._held.update((lease.lease_id, lease) for lease in leases)
            return [self._read(lease, branches) for lease in leases]
        except BaseException as error:
            # The client is closed, so nothing can be given back: what was leased since runs out.
            if self._closing.is_set() and isinstance(error, Exception):
                raise CancelledError from error
            self._let_go([lease.lease_id for lease in leases])
            raise

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise BadRequest("collector: it is closed: make another one", field="collector")

    def used(self, groups: Iterable[CollectedGroup]) -> None:
        """A step has used these groups, which is not durable yet: others may be started in their place. Raises: as
        `acknowledge`."""
        self._tell(groups, lambda lease_id: self._client.extend(lease_id, self._ttl_s, used=True), held=True)

    def acknowledge(self, groups: Iterable[CollectedGroup]) -> None:
        """These groups are never served again. The same again changes nothing.

        Raises: Conflict: a lease ran out, since this process stood still for longer than `lease_ttl_s`, and the group is somebody
            else's; the other groups have been acknowledged. Unreachable and the like: groups that have not been acknowledged are
            held as before.
        """
        self._tell(groups, self._client.acknowledge)

    def release(self, groups: Iterable[CollectedGroup]) -> None:
        """Give groups back, to be served again at once. Raises: as `acknowledge`."""
        self._tell(groups, self._client.release)

    def push(self, tensors: Any, version: str, **options: Any) -> Update:
        """`steno_adapters.weights.push` for this run and policy."""
        from steno_adapters.weights import push  # torch

        return push(self._client, tensors, version, run=self.run, policy=self.policy, **options)

    def close(self) -> None:
        """Idempotent. What is held is given back."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        for rolling in self._rolling:
            rolling.future.cancel()
        until = time.monotonic() + CLOSE_S
        ended = [rolling.ended.wait(max(0.0, until - time.monotonic())) for rolling in self._rolling]
        if self._loop is not None and all(ended):  # else it goes on ending trials while this process lives
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._let_go(list(self._held))
        self._client.close()
        self._work.cleanup()

    # -- parts ----------------------------------------------------------------------------------------------------------------

    def _start(
        self, tasks: Iterable[Task | Mapping[str, Any]], n: int, admission: Admission, *, again: bool = False
    ) -> LoopTask:
        if self._prepared is None and self._executor is None:
            raise BadRequest(
                "agent: got None, must be a function or settings, for trials to be run here", field="agent"
            )
        hide = self._prepared.settings.hide if self._prepared is not None else ()
        with self._lock:
            self._check_open()
            if self._loop is None:
                self._loop = started_loop()
            planned = self._noted(_planned(tasks, hide, "again" if again else f"{self._name}-{self._round}", again))
            self._round += 1
            rolling = LoopTask(self._loop, self._roll(planned, n, admission, again))
            self._rolling = [earlier for earlier in self._rolling if not earlier.ended.is_set()] + [rolling]
        return rolling

    def _noted(self, planned: Iterator[Planned]) -> Iterator[Planned]:
        for plan in planned:
            self._mine.add(group_id(self._groups_run, plan.task.task_id, plan.round))
            yield plan

    async def _roll(self, planned: Iterator[Planned], n: int, admission: Admission, again: bool) -> None:
        async with AsyncClient(self._proxy, self._key, retries=CLIENT_RETRIES) as client:
            executor = None
            if self._prepared is not None and self._prepared.ray is None:
                executor = self._prepared.executor(client)
            try:
                await self._rollouts(client, executor, n, admission, again).run(planned)
            finally:
                if executor is not None:
                    executor.close()

    def _rollouts(
        self, client: AsyncClient, executor: Executor | None, n: int, admission: Admission, again: bool
    ) -> Rollouts:
        """again: a later start finds these groups again, so that trials which have not begun may stay open."""
        if self._prepared is not None:
            changed = {
                "group_size": n, "run": self._groups_run if again else None, "groups_per_step": admission.groups_per_step,
                "max_staleness_steps": admission.max_staleness_steps,
            }  # fmt: skip
            prepared = replace(self._prepared, settings=self._prepared.settings.model_copy(update=changed))
            return prepared.rollouts(client, executor=executor, observers=[self._failures])
        assert self._executor is not None
        options = RunnerOptions(("agent",), Path(self._work.name), timeout_s=self._timeout_s, inherited={})
        runner = TrialRunner(client, ExecutorPlayer(client, self._executor, options), options)
        options_of_groups = replace(self._options, size=n, resumable=again)
        return Rollouts(client, runner, options_of_groups, admission=admission, observers=[self._failures])

    def _read(self, lease: Lease, branches: Branches) -> CollectedGroup:
        earlier = lease.group.group_id not in self._mine
        return read_group(
            self._client, lease, policy=self.policy, models=self._train_models, branches=branches, earlier=earlier
        )

    def _let_go(self, lease_ids: list[str]) -> None:
        """Release these leases; a lease that can't be released runs out."""
        with self._lock:
            for lease_id in lease_ids:
                self._held.pop(lease_id, None)
        for lease_id in lease_ids:
            with contextlib.suppress(StenoError):
                self._client.release(lease_id)

    def _tell(self, groups: Iterable[CollectedGroup], call: Callable[[str], object], *, held: bool = False) -> None:
        """Run `call` with each group's lease id, also after a refusal. Args: held: keep the leases that were not refused.

        Raises: StenoError: the first refusal, after the calls for all groups. A retryable error is raised at once, since the next
            call would fail too: its group and the groups after it are held as before.
        """
        refused: StenoError | None = None
        for group in groups:
            lease_id, over = group.lease.lease_id, False
            with self._lock:
                self._telling.add(lease_id)
            try:
                call(lease_id)
                over = not held
            except StenoError as error:
                if error.retryable:
                    raise
                refused, over = refused or error, True
            finally:
                with self._lock:
                    self._telling.discard(lease_id)
                    if over:
                        self._held.pop(lease_id, None)
        if refused is not None:
            raise refused

    def _keep(self) -> None:
        """Hold what is leased, in a thread of its own, until it is acknowledged or released. Several at a time: one after the
        other, hundreds may take longer than a lease lasts."""
        while not self._closing.wait(self._ttl_s / 4):
            with self._lock:
                held = list(self._held)
            left = iter(held)
            extending = [
                threading.Thread(target=self._extend, args=(left,), daemon=True)
                for _ in range(min(EXTENDED_AT_ONCE, len(held)))
            ]
            for thread in extending:
                thread.start()
            for thread in extending:
                thread.join()

    def _extend(self, lease_ids: Iterator[str]) -> None:
        """Args: lease_ids: shared by the threads that do this; a list's iterator gives each to one of them."""
        for lease_id in lease_ids:
            if self._closing.is_set():
                return
            try:
                self._client.extend(lease_id, self._ttl_s)
            except RuntimeError:  # the client has been closed meanwhile
                if not self._closing.is_set():
                    raise
            except StenoError as error:
                if error.retryable:
                    continue
                with self._lock:
                    # A thread that is calling the proxy about this lease gets the same refusal, or has just ended the lease.
                    lost = None if lease_id in self._telling else self._held.pop(lease_id, None)
                if lost is not None:
                    log.warning("the lease of group %s was lost: %s", lost.group.group_id, error)


def _prepared(settings: RolloutSettings, run: str, key: str | None) -> Prepared:
    """Args: key: by which the proxy is asked, whatever the settings have. Raises: ConfigError."""
    shown = SecretStr(key) if key is not None else None
    prepared = Prepared.of(settings.model_copy(update={"key": shown}), run)
    for warning in prepared.warnings:
        log.warning("%s", warning)
    return prepared


def _planned(
    tasks: Iterable[Task | Mapping[str, Any]], hide: Collection[str], round_name: str, again: bool
) -> Iterator[Planned]:
    seen = Counter[str]()
    for given in tasks:
        task = given if isinstance(given, Task) else Task(str(given.get("task_id", "")), *divided(given, hide))
        if not task.task_id:
            raise BadRequest(f"tasks: {str(given)[:200]!r} has no task_id", field="tasks")
        if seen[task.task_id] and not again:
            raise BadRequest(f"tasks: two tasks are named {task.task_id!r}; each name must occur once", field="tasks")
        seen[task.task_id] += 1
        yield Planned(task, f"{round_name}-{seen[task.task_id]}")
