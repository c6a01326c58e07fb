"""What real agents sent, sent again: every request is taken, and recognised as it was when the agent itself was there.

The proxy, its relay and its store are real, the engine says what was answered then. One fixture per agent and version; older
versions stay, since people run them (`scripts/record-wire` makes new ones).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.errors import NoWorker
from steno.contracts.records import Turn
from steno.contracts.wire.frames import Generate
from steno_proxy import metrics
from steno_proxy.metrics import DROPPED
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say
from tests.wire.fixture import FOLDER, Answer, Exchange, of_agent, read, renamed

FIXTURES = sorted(FOLDER.glob("*.jsonl"))
TRIALS = [(path, trial) for path in FIXTURES for trial in sorted({each.trial for each in read(path).exchanges})]
MAIN_TURNS = 10


class Again:
    """One trial of a recording, on a proxy whose engine answers as it was answered then."""

    def __init__(self, proxy: Proxy, trial: str) -> None:
        self.proxy, self.trial = proxy, trial
        self.turns: dict[int, Turn] = {}
        self.saying = Say()
        proxy.engine.script = self._say

    def _say(self, request: Generate) -> Say:
        return self.saying

    async def send(self, number: int, exchange: Exchange) -> None:
        """Raises: AssertionError: it was not taken, or its stream broke."""
        content = None
        self.saying = Say(refuse=NoWorker("nobody is there just now"))  # where nothing is on record, nothing was begun
        if exchange.body is not None:
            content = renamed(json.dumps(exchange.body, ensure_ascii=False), lambda n: self.turns[n].turn_id).encode()
        if exchange.answer is not None:
            self.saying = said(exchange.answer)
        headers = {name: value for name, value in exchange.headers.items() if value}
        path = exchange.path.replace("{trial}", self.trial)
        before = await self.proxy.store.turns(self.trial) if self.turns else []
        status, text, whole = await self._read(exchange.method, path, content, headers)
        assert status == exchange.status, f"request {number}: {text[:1000]}"
        if exchange.answer is None:
            return
        failed = not whole or status >= 500 or "event: error" in text or "response.failed" in text
        assert failed == exchange.answer.broke, f"request {number}: {text[-1000:]}"
        turns = await self.proxy.turns(self.trial, len(before) + 1)
        [self.turns[number]] = turns[len(before) :]

    async def _read(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str, bool]:
        """Status, text, and whether it came to its end."""
        got = b""
        async with self.proxy.http.stream(method, path, content=content, headers=headers) as answer:
            try:
                async for piece in answer.aiter_bytes():
                    got += piece
            except httpx.RemoteProtocolError:
                return answer.status_code, got.decode(), False
            return answer.status_code, got.decode(), True


def said(answer: Answer) -> Say:
    calls = [(f"own{i}", name, arguments) for i, (name, arguments) in enumerate(answer.calls)]
    if not answer.broke:
        return Say(answer.content, answer.reasoning, calls, finish=answer.finish_reason)
    if answer.closed:  # by what came next, and has no end
        calls.append(("half", "half", '{"a'))
    after = len(answer.reasoning) + len(answer.content) + len(calls)
    return Say(answer.content, answer.reasoning, calls, fail_after=after)


def dropped() -> Counter[str]:
    """How many items of each type the proxy has dropped so far, in any dialect."""
    counts: Counter[str] = Counter()
    for metric in DROPPED.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                counts[sample.labels["type"]] += int(sample.value)
    return counts


def plain(reply: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in reply.get("tool_calls", [])]
    return reply["content"], reply.get("reasoning_content", ""), calls


@pytest.mark.parametrize(("path", "trial"), TRIALS, ids=[f"{path.stem}-{trial}" for path, trial in TRIALS])
async def test_what_an_agent_sent_is_taken_and_recognised_as_it_was_then(
    path: Path, trial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_types", {})  # other tests of this process may have used up the types that are named
    exchanges = [each for each in read(path).exchanges if each.trial == trial]
    async with running(ParrotEngine(context_tokens=1_000_000)) as proxy:
        again = Again(proxy, trial)
        for number, exchange in enumerate(exchanges):
            counted = dropped()
            await again.send(number, exchange)
            if exchange.answer is not None:  # of what was refused nobody wrote down what was left out
                assert sorted((dropped() - counted).elements()) == exchange.dropped
    numbers = {turn.turn_id: number for number, turn in again.turns.items()}
    answers = {number: each.answer for number, each in enumerate(exchanges) if each.answer is not None}
    for number, answer in answers.items():
        turn = again.turns[number]
        assert (number, numbers[turn.parent_id] if turn.parent_id else None) == (number, answer.parent)
        assert plain(turn.reply) == (answer.content, answer.reasoning, answer.calls)
        assert (number, turn.partial) == (number, answer.broke)
        assert (number, numbers[turn.retry_of] if turn.retry_of else None) == (number, answer.retry_of)
        if turn.parent_id:  # which of several roots came first, an agent that sends them together leaves to chance
            assert (number, turn.fork_reason) == (number, answer.fork_reason)
    roots = [number for number, turn in again.turns.items() if turn.parent_id is None]
    assert len(roots) == sum(answer.parent is None for answer in answers.values())


@pytest.mark.parametrize("path", FIXTURES, ids=[path.stem for path in FIXTURES])
def test_each_fixture_has_a_refusal_and_an_answer_that_broke_off(path: Path) -> None:
    exchanges = read(path).exchanges
    assert any(each.status == 503 for each in exchanges)
    assert any(each.answer is not None and each.answer.broke and each.answer.content for each in exchanges)


@pytest.mark.parametrize("agent", ["claude-code", "codex"])
def test_two_have_an_answer_in_which_the_agent_was_killed_and_what_it_went_on_with(agent: str) -> None:
    trials = [[each for each in read(path).exchanges if "killed" in each.trial] for path in of_agent(agent)]
    answers = [each.answer for each in trials[-1] if each.answer is not None]
    [killed] = [n for n, answer in enumerate(answers) if answer.finish_reason == "cancelled"]
    assert len(answers) > killed + 1 and answers[killed + 1].parent in (killed, killed - 1)


@pytest.mark.parametrize("path", FIXTURES, ids=[path.stem for path in FIXTURES])
def test_each_fixture_has_a_normal_run_without_a_fork_below_its_root(path: Path) -> None:
    """So that the replay above asks what it should: a fixture of a run that went wrong would be replayed as gladly."""
    recording = read(path)
    longest = 0
    for trial in {each.trial for each in recording.exchanges}:
        answers = [each.answer for each in recording.exchanges if each.trial == trial]
        depths: dict[int, int] = {}
        for number, answer in enumerate(answers):
            if answer is not None and (
                answer.parent is None or (answer.fork_reason is None and answer.parent in depths)
            ):
                depths[number] = 1 if answer.parent is None else depths[answer.parent] + 1
        longest = max(longest, *depths.values())
    assert longest >= MAIN_TURNS
    assert path.stem == f"{recording.agent}-{recording.version}"
