"""Agents, and the harness that ends their sessions: what each one saw is kept, to be held against the record.

A raw agent marks its retries as SDKs do and repeats until it has an answer: with a deployment that heals, each request is
answered in the end. What an agent may be told meanwhile is 408, 409, 429, 5xx, or a connection that breaks.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai

from tests.chaos.deployment import Deployment
from tests.chaos.predict import TOOL
from tests.chaos.schedule import REPLICAS, Agent

PATIENCE_S = 60.0
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
    """An answer that an agent had whole. asked: text of its last message. attempts: (replica, status or what broke)."""

    turn_id: str
    asked: str
    content: str
    calls: list[tuple[str, str]]
    call_ids: list[str]
    at: float
    attempts: list[tuple[int, str]]

    @property
    def moved(self) -> bool:
        """Asked at several replicas: one that is asked while another one runs it can't join it."""
        return len({replica for replica, _ in self.attempts}) > 1 or len(self.attempts) > 1


@dataclass
class Trial:
    """What became of one agent. left: it went away in the middle of a request. retried: texts whose request was repeated."""

    trial_id: str
    agent: Agent
    seen: list[Seen] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    retried: set[str] = field(default_factory=set)
    left: bool = False
    failure: str = ""
    ended: bool = False
    deleted: bool = False
    attempts: int = 0


class Speaker:
    """Runs one agent."""

    def __init__(self, deployment: Deployment, trial: Trial, http: aiohttp.ClientSession) -> None:
        self._deployment = deployment
        self._trial = trial
        self._http = http

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
        except (Broken, Unexpected, openai.OpenAIError) as error:
            trial.failure = f"{type(error).__name__}: {error}"

    async def _converse(self) -> None:
        agent = self._trial.agent
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {self._trial.trial_id}."}]
        for turn in range(agent.turns):
            asked = f"step {turn}"
            if messages[-1].get("tool_calls"):
                calls = messages[-1]["tool_calls"]
                results = [f"{asked}, result {place}" for place in range(len(calls))]
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                    for call, result in zip(calls, results, strict=True)
                ]
                asked = results[-1]
            else:
                messages.append({"role": "user", "content": asked})
            messages.append(await self._ask(messages, asked, turn))
            if agent.forks == turn:
                aside = [{"role": "user", "content": f"aside {turn}"}]
                await self._ask(aside, f"aside {turn}", turn)

    async def _ask(self, messages: list[dict[str, Any]], asked: str, turn: int) -> dict[str, Any]:
        """One answer, however often it takes."""
        agent, trial = self._trial.agent, self._trial
        trial.asked.append(asked)
        until = time.monotonic() + PATIENCE_S
        attempts: list[tuple[int, str]] = []
        while True:
            replica = (agent.replicas[turn] + len(attempts) * (agent.replicas[0] != agent.replicas[-1])) % REPLICAS
            body = {"model": "any", "messages": messages, "tools": [TOOL], "stream": agent.streams[turn]}
            trial.attempts += 1
            try:
                if agent.client == "sdk":
                    message, answer_id = await self._sdk(body, replica)
                else:
                    message, answer_id = await self._raw(body, replica, len(attempts))
                attempts.append((replica, "whole"))
                break
            except (Broken, openai.APIConnectionError, openai.APITimeoutError) as error:
                attempts.append((replica, str(error)))
            trial.retried.add(asked)
            if time.monotonic() > until:
                raise Broken(f"{asked!r} was never answered: {attempts}")
            await asyncio.sleep(min(0.2 * len(attempts), 1.0))
        calls = message.get("tool_calls") or []
        trial.seen.append(
            Seen(
                turn_id=answer_id.removeprefix("chatcmpl-"),
                asked=asked,
                content=message["content"] or "",
                calls=[(call["function"]["name"], call["function"]["arguments"]) for call in calls],
                call_ids=[call["id"] for call in calls],
                at=time.monotonic(),
                attempts=attempts,
            )
        )
        return {key: value for key, value in message.items() if value}

    async def _sdk(self, body: dict[str, Any], replica: int) -> tuple[dict[str, Any], str]:
        base = f"{self._deployment.url(replica)}/{self._trial.trial_id}/v1"
        async with openai.AsyncOpenAI(api_key="none", base_url=base, max_retries=8, timeout=SILENCE_S) as client:
            try:
                raw = await client.chat.completions.with_raw_response.create(**body)
            except openai.APIStatusError as error:
                if error.status_code in OVER:
                    raise Over from error
                if error.status_code in RETRYABLE:
                    raise Broken(str(error.status_code)) from error
                raise
            if raw.retries_taken:
                self._trial.retried.add(self._trial.asked[-1])
            answer = raw.parse()
        return answer.choices[0].message.model_dump(exclude_none=True) | {
            "content": answer.choices[0].message.content
        }, answer.id

    async def _raw(self, body: dict[str, Any], replica: int, retries: int) -> tuple[dict[str, Any], str]:
        url = f"{self._deployment.url(replica)}/{self._trial.trial_id}/v1/chat/completions"
        headers = {"x-stainless-retry-count": str(retries)} if retries else {}
        patience = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        try:
            async with self._http.post(url, json=body, headers=headers, timeout=patience) as response:
                if response.status in OVER:
                    raise Over
                if response.status in RETRYABLE:
                    raise Broken(f"{response.status} {(await response.text())[:200]}")
                if response.status != 200:
                    raise Unexpected(f"{response.status} {await response.text()}")
                if body["stream"]:
                    return await self._read(response)
                answer = json.loads(await response.read())
                return answer["choices"][0]["message"], answer["id"]
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise Broken(repr(error)) from error

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[dict[str, Any], str]:
        """A streamed answer, whole only with its `[DONE]`."""
        content, calls, answer_id, finish, done = "", {}, "", None, False  # type: ignore[var-annotated]
        async for raw in response.content:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                answer_id = chunk.get("id", answer_id)
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"]
                    content += delta.get("content") or ""
                    finish = choice["finish_reason"] or finish
                    for piece in delta.get("tool_calls") or ():
                        call = calls.setdefault(
                            piece["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                        )
                        call["id"] += piece.get("id") or ""
                        call["function"]["name"] += piece["function"].get("name") or ""
                        call["function"]["arguments"] += piece["function"].get("arguments") or ""
                if self._trial.agent.slow:
                    await asyncio.sleep(0.02)
        if not done or finish is None:
            raise Broken(f"the stream ended early (finish {finish}, done {done})")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return message, answer_id
