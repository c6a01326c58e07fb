"""Agents: what each one saw is kept, to be held against the record.

A raw agent marks its retries where its format's clients do, and repeats until it has an answer: with a deployment that heals,
each request is answered in the end. What an agent may be told meanwhile is 408, 409, 429, 5xx, or a connection that breaks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.chaos.clients.formats import FORMATS, Answer, Call, Line, Misspoken
from tests.chaos.clients.sdks import BROKEN, SDKS, Ask, status_of
from tests.chaos.schedule import REPLICAS, Agent
from tests.chaos.system.deployment import Deployment

PATIENCE_S = 120.0
SILENCE_S = 6.0
RETRYABLE = frozenset((408, 409, 429, 500, 502, 503, 504))
OVER = frozenset((403, 404, 410))


class Broken(Exception):
    """No whole answer; asking again may help."""


class Over(Exception):
    """The session has ended."""


class Unexpected(Exception):
    """What no agent should be told."""


@dataclass
class Seen:
    """An answer that an agent had, whole or a part of it. asked: text of the request's last message. replica: that sent it.
    model: the name that was asked for; "": it is not checked."""

    turn_id: str
    asked: str
    content: str
    calls: Sequence[Call]
    replica: int = 0
    model: str = ""


@dataclass
class Trial:
    """What became of one agent. acted_on: closed blocks of streams that broke later. heard: text of those that have no blocks.
    left: it went away in the middle of a request. retried: texts whose request was repeated."""

    trial_id: str
    agent: Agent
    seen: list[Seen] = field(default_factory=list)
    acted_on: list[Seen] = field(default_factory=list)
    heard: list[Seen] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    retried: set[str] = field(default_factory=set)
    left: bool = False
    failure: str = ""
    ended: bool = False
    deleted: bool = False
    attempts: int = 0

    @property
    def calm(self) -> bool:
        """Each request was answered whole the first time, and its session ended after the last."""
        return not (self.retried or self.left or self.failure) and len(self.seen) == len(self.asked)


class Speaker:
    """Runs one agent."""

    def __init__(self, deployment: Deployment, trial: Trial, http: aiohttp.ClientSession) -> None:
        self._deployment = deployment
        self._trial = trial
        self._http = http
        self._format = FORMATS[trial.agent.format]

    async def run(self, began: float) -> None:
        """Until its conversation is over, its session has ended, or it has gone. Failures are noted on the trial."""
        agent, trial = self._trial.agent, self._trial
        await asyncio.sleep(max(0.0, began + agent.start_s - time.monotonic()))
        try:
            if agent.gone_after_s and agent.end == "gone":
                async with asyncio.timeout(agent.gone_after_s):
                    await self._converse()
            else:
                await self._converse()
        except TimeoutError:
            trial.left = True
        except Over:
            if agent.end not in ("cut-short", "deleted-early"):
                trial.failure = "its session was over before it had been ended"
        except (Broken, Unexpected, Misspoken) as error:
            trial.failure = f"{type(error).__name__}: {error}"

    async def _converse(self) -> None:
        agent = self._trial.agent
        lines = [Line("system", f"You are {self._trial.trial_id}.")]
        for turn in range(agent.turns):
            asked = f"step {turn}"
            last = lines[-1].answer
            if last is not None and last.calls:
                results = [(call, f"{asked}, result {place}") for place, call in enumerate(last.calls)]
                lines.append(Line("tool", results=results))
                asked = results[-1][1]
            else:
                lines.append(Line("user", asked))
            lines.append(Line("assistant", answer=await self._ask(lines, asked, turn)))
            if agent.forks == turn:
                await self._ask([Line("user", f"aside {turn}")], f"aside {turn}", turn)

    async def _ask(self, lines: Sequence[Line], asked: str, turn: int) -> Answer:
        """One answer, however often it takes."""
        agent, trial = self._trial.agent, self._trial
        trial.asked.append(asked)
        until = time.monotonic() + PATIENCE_S
        attempts: list[tuple[int, str]] = []
        while True:
            replica = (agent.replicas[turn] + len(attempts) * (agent.replicas[0] != agent.replicas[-1])) % REPLICAS
            trial.attempts += 1
            try:
                ask = self._sdk if agent.client == "sdk" else self._raw
                answer = await ask(lines, replica, turn, len(attempts))
                break
            except Broken as error:
                attempts.append((replica, str(error)))
            trial.retried.add(asked)
            if time.monotonic() > until:
                raise Broken(f"{asked!r} was never answered: {attempts}")
            await asyncio.sleep(min(0.2 * len(attempts), 1.0))
        trial.seen.append(Seen(answer.turn_id, asked, answer.content, answer.calls, model=agent.models[turn]))
        return answer

    async def _sdk(self, lines: Sequence[Line], replica: int, turn: int, retries: int) -> Answer:
        trial, model = self._trial, self._trial.agent.models[turn]
        body = self._format.body(lines, trial.agent.streams[turn], model)
        url = f"{self._deployment.url(replica)}/{trial.trial_id}"
        try:
            found = await SDKS[self._format.name](
                Ask(url, body, model, SILENCE_S, lambda: trial.retried.add(trial.asked[-1]))
            )
        except (*BROKEN, ConnectionError, TimeoutError) as error:
            self._check(status_of(error), repr(error))
            raise Broken(repr(error)) from error
        return self._format.whole(found)

    async def _raw(self, lines: Sequence[Line], replica: int, turn: int, retries: int) -> Answer:
        stream, model = self._trial.agent.streams[turn], self._trial.agent.models[turn]
        url = f"{self._deployment.url(replica)}/{self._trial.trial_id}{self._format.path(stream, model)}"
        headers = {"x-stainless-retry-count": str(retries)} if retries and self._format.marked else {}
        patience = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        body = self._format.body(lines, stream, model)
        try:
            async with self._http.post(url, json=body, headers=headers, timeout=patience) as response:
                if response.status != 200:
                    self._check(response.status, await response.text())
                if stream:
                    return await self._read(response, replica)
                return self._format.whole(json.loads(await response.read()))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise Broken(repr(error)) from error

    def _check(self, status: int | None, words: str) -> None:
        """Raises: Over, Broken or Unexpected, by the answer's status; nothing if there was no status, or 200."""
        if status in OVER:
            raise Over
        if status in RETRYABLE:
            raise Broken(f"{status} {words[:200]}")
        if status not in (None, 200):
            raise Unexpected(f"{status} {words}")

    async def _read(self, response: aiohttp.ClientResponse, replica: int) -> Answer:
        """A streamed answer. Blocks that it closed count also where it breaks."""
        reader = self._format.reader()
        try:
            async for raw in response.content:
                line = raw.decode()
                if line.startswith("data: "):
                    reader.event(line[6:].strip())
                    if self._trial.agent.slow:
                        await asyncio.sleep(0.02)
            if not reader.whole:
                raise Broken(f"the stream ended early: {reader.answer}")
            return reader.answer
        finally:
            trial, closed, heard = self._trial, reader.closed, reader.answer
            if not reader.whole and (closed.content or closed.calls):
                trial.acted_on.append(Seen(closed.turn_id, trial.asked[-1], closed.content, closed.calls, replica))
            elif not reader.whole and heard.content:
                trial.heard.append(Seen(heard.turn_id, trial.asked[-1], heard.content, (), replica))
