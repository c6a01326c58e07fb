"""One seed from its beginning to its verdict: agents, harness and trainer at work while the faults of its schedule strike."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from steno.client.client import AsyncClient
from steno.contracts.errors import Gone, NotFound, StenoError
from steno.contracts.policy import UpdateSpec
from steno.contracts.records import Turn
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.worker_view import WorkerView
from tests.chaos import faults, journal
from tests.chaos.clients.agents import OVER, Speaker, Trial
from tests.chaos.clients.formats import FORMATS, Line
from tests.chaos.clients.trainer import Trainers
from tests.chaos.invariants import (
    check_heard,
    check_ledger,
    check_received,
    check_seen,
    check_session,
    check_turns,
    tokens_by_version,
)
from tests.chaos.journal import check_sampled
from tests.chaos.predict import BASE_VERSION
from tests.chaos.schedule import REPLICAS, Fault, Schedule
from tests.chaos.system.deployment import Deployment
from tests.support.records.tokens import counters
from tests.support.weights.shards import tensor, write

CONTROL_S = 180.0
"""Within this a call of the control plane succeeds: every fault is over long before."""
SETTLE_S = 60.0
SLACK_FDS = 16
FAILOVER_FDS = 32
"""Added to SLACK_FDS: while a failover makes all calls wait, each opens a connection, and the pool (64) keeps them."""
SLACK_BYTES = 32 * 2**20
LINEAGES = {"default": "chaos", "other": "other"}
ALARMS = re.compile(
    r"Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b|never (?:awaited|retrieved)|broke the protocol"
)
"""Log lines that fail a seed. `broke the protocol` too: workers are correct, so frames came at a wrong place or time (I9)."""
ALLOWED = (
    re.compile(
        r"ERROR steno_proxy\.turns\.choice .*can't record turn \S+ \(\d+ tokens\): "
        r"the session store (does not answer|did not replicate a write)"
    ),  # and the agent was told
    re.compile(r"ERROR.*can't start|ERROR.*\[Errno 98\]"),  # a port that is still somebody's: it is started again
)


@dataclass
class Verdict:
    """What became of a seed. wrong: broken invariants, in words. counts: what happened, to be read. kept: (descriptors,
    bytes) that a process had more at its end than before it, at most."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kept: tuple[int, int] = (0, 0)
    took_s: float = 0.0


class Story:
    """Args: versions: those posted to this deployment so far; extended here. name: the run's id."""

    def __init__(self, deployment: Deployment, schedule: Schedule, versions: list[str], *, name: str) -> None:
        self._deployment = deployment
        self._schedule = schedule
        self._posting = asyncio.Lock()  # one after the other: the weights posted last are the newest
        self._versions = versions
        self._run_id = name
        self.verdict = Verdict(schedule.seed)
        self._trials: list[Trial] = []
        self._clients: list[AsyncClient] = []
        self._calls = 0

    async def play(self) -> None:
        """Play the seed and fill `verdict`. Raises: RuntimeError: the deployment did not become healthy again."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            for number in range(REPLICAS):
                self._clients.append(await stack.enter_async_context(self._client(number)))
            for program in self._deployment.programs:
                program.baseline = program.baseline or program.usage()
            groups = await self._register()
            second, at_s = self._schedule.second, self._schedule.second_at_s
            trainer = Trainers(self._client, REPLICAS, self._run_id, self._schedule.trainer, second, at_s)
            training = asyncio.create_task(trainer.run(len(groups)))
            start = time.monotonic()
            speakers = [asyncio.create_task(self._trial(trial, http, start)) for trial in self._trials]
            strikes = [asyncio.create_task(self._strike(fault, start)) for fault in self._schedule.faults]
            stack.push_async_callback(_end, [training, *speakers, *strikes])
            for done in await asyncio.gather(*strikes, return_exceptions=True):
                if isinstance(done, BaseException):
                    self._wrong(f"a fault could not be carried out: {done!r}")
            await self._deployment.heal()
            for done in await asyncio.gather(*speakers, return_exceptions=True):
                if isinstance(done, BaseException):
                    self._wrong(f"a trial's harness failed: {done!r}")
            await self._frozen(http)
            await self._train(training, trainer)
            await self._look(trainer, groups)
            await http.close()
        await self._settled()
        self._read_logs()
        self.verdict.took_s = time.monotonic() - began

    # -- what happens

    def _client(self, replica: int, epoch: int | None = None) -> AsyncClient:
        return AsyncClient(self._deployment.direct(replica), retries=0, timeout_s=8.0, epoch=epoch)

    async def _register(self) -> dict[str, bool]:
        """Group -> whether it has a deadline."""
        agents, size = self._schedule.agents, self._schedule.group_size
        groups: dict[str, bool] = {}
        for number, first in enumerate(range(0, len(agents), size)):
            group_id, members = f"{self._run_id}-{first}", agents[first : first + size]
            due = self._schedule.deadlines[number]
            spec = GroupSpec(group_id=group_id, run_id=self._run_id, size=len(members), deadline_s=due)
            made = await self._control("create_group", spec)
            found = [one.session.trial_id for one in made.trials]
            self._trials += [Trial(*pair) for pair in zip(found, agents[first : first + size], strict=True)]
            groups[group_id] = due is not None
        return groups

    async def _strike(self, fault: Fault, start: float) -> None:
        await asyncio.sleep(max(0.0, start + fault.at_s - time.monotonic()))
        await faults.strike(self._deployment, fault, self._update)
        self.verdict.counts[fault.kind] += 1

    async def _update(self, policy: str) -> None:
        async with self._posting:
            await self._post_update(policy)

    async def _post_update(self, policy: str) -> None:
        step, lineage = len(self._versions), LINEAGES[policy]
        self._versions.append(f"{lineage}/{step}")
        folder = self._deployment.folder / "weights" / str(step)
        manifest = write(folder, {"a.safetensors": {"x": tensor([8, 8], step)}})
        await self._control(
            "post_update",
            UpdateSpec(
                policy=policy,
                lineage=lineage,
                step=step,
                transport="filesystem",
                location=str(folder),
                manifest=manifest,
            ),
        )

    async def _trial(self, trial: Trial, http: aiohttp.ClientSession, start: float) -> None:
        """The agent, and the end of its session as its harness makes it."""
        speaking = asyncio.create_task(Speaker(self._deployment, trial, http).run(start))
        if trial.agent.end in ("cut-short", "deleted-early"):
            await asyncio.wait({speaking}, timeout=trial.agent.start_s + trial.agent.gone_after_s)
            await self._end(trial)
        await speaking
        await self._end(trial)
        if trial.failure:
            self._wrong(f"{trial.trial_id} failed: {trial.failure}")

    async def _end(self, trial: Trial) -> None:
        """Complete or delete the session. Called again later: this finishes what a killed replica has left unfinished."""
        if trial.agent.end.startswith("deleted"):
            await self._control("delete", trial.trial_id)
            trial.deleted = True
        else:
            await self._control("complete", trial.trial_id, Completion(reward=float(len(trial.trial_id) % 2)))
        trial.ended = True

    async def _control(self, call: str, *args: object) -> Any:
        """A call of the control plane at one replica after the other, until it is answered."""
        until = time.monotonic() + CONTROL_S
        while True:
            self._calls += 1
            try:
                return await getattr(self._clients[self._calls % REPLICAS], call)(*args)
            except StenoError as error:
                if not error.retryable or time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

    async def _frozen(self, http: aiohttp.ClientSession) -> None:
        """Late requests are refused, at every replica."""
        for place, trial in enumerate(self._trials):
            await self._end(trial)
            spoken = FORMATS[trial.agent.format]
            url = f"{self._deployment.direct(place % REPLICAS)}/{trial.trial_id}{spoken.path(False)}"
            until = time.monotonic() + CONTROL_S
            while True:
                try:
                    async with http.post(url, json=spoken.body([Line("user", "late")], False)) as response:
                        status = response.status
                except aiohttp.ClientError:  # the replica may have closed this pooled connection meanwhile
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(0.1)
                    continue
                if (
                    status != 503 or time.monotonic() > until
                ):  # a replica notices that a connection to Redis was lost only when it uses it
                    break
            if status not in OVER:
                self._wrong(f"{trial.trial_id} has ended, and a late request was answered {status}")

    async def _train(self, training: asyncio.Task[None], trainer: Trainers) -> None:
        until = time.monotonic() + CONTROL_S
        while not training.done() and time.monotonic() < until:
            await asyncio.wait({training}, timeout=0.3)
            view = await self._control("run", self._run_id)
            if view.groups.in_hand + view.groups.used == 0:
                break
        while not (training.done() or trainer.idle) and time.monotonic() < until:
            await asyncio.wait({training}, timeout=0.05)
        training.cancel()
        [result] = await asyncio.gather(training, return_exceptions=True)
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            self._wrong(f"the trainer failed: {result!r}")

    # -- what must hold

    async def _look(self, trainer: Trainers, groups: dict[str, bool]) -> None:
        records: dict[str, list[Turn]] = {}
        counts = self.verdict.counts
        for trial in self._trials:
            counts["requests"] += trial.attempts
            counts["answers"] += len(trial.seen)
            if trial.deleted:
                await self._is_gone(trial)
                continue
            turns = records[trial.trial_id] = await self._turns(trial.trial_id)
            session = await self._control("session", trial.trial_id)
            wrong, twice = check_seen(trial, turns)
            counts["answered twice"] += twice
            counts["turns"] += len(turns)
            counts["partial"] += sum(turn.partial for turn in turns)
            counts["taken over"] += sum(bool(turn.workers) for turn in turns)
            counts["across updates"] += sum(len(turn.versions) > 1 for turn in turns)
            for sentence in [*wrong, *check_turns(turns, self._versions), *check_session(trial, session, turns)]:
                self._wrong(sentence)
        view = await self._control("run", self._run_id)
        recorded = {trial_id: tokens_by_version(turns) for trial_id, turns in records.items()}
        for sentence in trainer.taken.wrong:
            self._wrong(sentence)
        for sentence in check_ledger(view, trainer.taken, recorded, groups):
            self._wrong(sentence)
        for trial in self._trials:
            if not trial.deleted:
                for sentence in check_heard(trial, records[trial.trial_id], self._schedule.faults, view):
                    self._wrong(sentence)
        calm = {trial.trial_id: trial.calm for trial in self._trials}
        wrong, fates = check_sampled(journal.read(self._deployment.journals, self._run_id), records, calm)
        for sentence in wrong:
            self._wrong(sentence)
        counts.update({f"tokens {fate}": count for fate, count in fates.items()})
        counts["tokens"] += sum(sum(tokens.values()) for tokens in recorded.values())
        counts["leases"] += trainer.taken.grants
        counts["acknowledgements refused"] += trainer.taken.refused
        counts["trainers superseded"] += trainer.taken.superseded

    async def _turns(self, trial_id: str) -> list[Turn]:
        turns: list[Turn] = []
        while True:
            page = await self._control("turn_page", trial_id)
            turns += page.items
            if page.next_start is None:
                return turns

    async def _is_gone(self, trial: Trial) -> None:
        try:
            turns = await self._turns(trial.trial_id)
            self._wrong(f"{trial.trial_id} was deleted and still has {len(turns)} turns")
        except (Gone, NotFound):
            pass
        left = await asyncio.to_thread(self._keys_of, trial.trial_id)
        if left - {"session"}:
            self._wrong(f"{trial.trial_id} was deleted and left {sorted(left)}")

    def _keys_of(self, trial_id: str) -> set[str]:
        with self._deployment.redis.primary.client() as client:
            return {key.decode().rsplit(":", 1)[1] for key in client.keys(f"steno:{{{trial_id}}}:*")}

    async def _settled(self) -> None:
        """Descriptors and memory are back where they were, nobody is busy with anything, and each replica says of every token
        that it received since its start where it went (I4)."""
        until = time.monotonic() + SETTLE_S
        slack = SLACK_FDS + FAILOVER_FDS * self._schedule.watched
        while True:
            off, kept = [], []
            for program in self._deployment.programs:
                fds, memory = program.usage()
                most_fds, most_memory = program.baseline or (fds, memory)
                kept.append((fds - most_fds, memory - most_memory))
                if fds > most_fds + slack:
                    off.append(f"{program.name} has {fds} descriptors open, and had {most_fds}")
                if memory > most_memory + SLACK_BYTES:
                    off.append(f"{program.name} takes {memory >> 20} MiB, and took {most_memory >> 20}")
            for number in range(REPLICAS):
                for one in await self._clients_of(number):
                    if one.in_flight:
                        off.append(f"at r{number}, {one.id} still has {one.in_flight} streams")
                counted = await asyncio.to_thread(counters, self._deployment.direct(number) + "/metrics")
                off += [f"I4: r{number}: {wrong}" for wrong in check_received(counted)]
            self.verdict.kept = max(fds for fds, _ in kept), max(memory for _, memory in kept)
            if not off:
                return
            if time.monotonic() > until:
                for sentence in off:
                    self._wrong(sentence)
                return
            await asyncio.sleep(0.2)

    async def _clients_of(self, number: int) -> list[WorkerView]:
        async with AsyncClient(self._deployment.direct(number)) as client:
            return await client.workers()

    def _read_logs(self) -> None:
        for program in self._deployment.programs:
            lines = program.new_log().splitlines()
            for place, line in enumerate(lines):
                if ALARMS.search(line) and not any(allowed.search(line) for allowed in ALLOWED):
                    self._wrong(f"log of {program.name}: " + "\n      ".join(lines[place : place + 12]))
                    break

    def _wrong(self, sentence: str) -> None:
        self.verdict.wrong.append(sentence)


def first_versions() -> list[str]:
    return [BASE_VERSION]


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks that still run, if a story could not be played to its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
