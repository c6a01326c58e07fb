"""A worker that gives up on a turn, and another that takes it: nothing lost from the record, nothing told twice (I4, I9)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from steno.contracts.errors import EngineFailed, TooManyRequests
from steno.contracts.wire.frames import TAKEOVER, Generate, Started, StreamEvent
from steno.models import TINY
from steno_proxy import metrics
from steno_worker.config import WorkerSettings
from steno_worker.engines.scripted.engine import build
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.tcprelay import TcpRelay
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say, check_drawn

AGAIN = {"x-stainless-retry-count": "1"}
Script = Callable[[Generate], Say]
Kind = Callable[[Script], ParrotEngine]
ROOM = 1000
"""Tokens that an `Able` parrot has room for, which it says."""
TRIALS = [f"trial-{number}" for number in range(8)]  # by their hashes, some begin at either worker


class Stubborn(ParrotEngine):
    """What it says can't be gone on with."""

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        async for event in super().generate(request):
            if isinstance(event, Started):
                event.resumable = False
            yield event


class Able(ParrotEngine):
    """It takes over what another one began."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, capabilities=[TAKEOVER])

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        if request.sampled_ids:
            assert request.job.sampling.max_tokens == ROOM, "the law in effect, not what was asked for"
        async for event in super().generate(request):
            if isinstance(event, Started):
                event.law = msgspec.structs.replace(event.law, max_tokens=ROOM)
            yield event


@contextlib.asynccontextmanager
async def two(
    bad: Script, kind: Kind = Stubborn, good: Script = lambda request: Say("whole"), **settings: Any
) -> AsyncIterator[Proxy]:
    """A proxy with a worker that speaks and one that does as `bad` says."""
    async with running(worker=False, **settings) as proxy:
        workers = []
        for name, script in (("good", good), ("bad", bad)):
            given = WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}"], worker_id=name)
            worker = Worker(given, kind(script), WorkerMetrics(CollectorRegistry()))
            workers.append((worker, asyncio.create_task(worker.run())))
        await until(lambda: len(proxy.app.state.hub.workers()) == 2)
        try:
            yield proxy
        finally:
            for worker, task in workers:
                worker.stop()
                worker.stop()
                await task


async def test_a_turn_that_had_not_begun_goes_to_another_worker() -> None:
    async with two(lambda request: Say(refuse=EngineFailed("no"))) as proxy:
        attempts: set[int] = set()
        for trial in TRIALS:
            answer = await proxy.chat(trial, "hello", stream=bool(len(attempts) % 2))
            assert answer.status_code == 200
            [turn] = await proxy.turns(trial)
            assert turn.worker_id == "good" and not turn.workers and turn.fork_reason is None
            attempts.add(turn.attempt)
        assert attempts == {0, 1}


async def test_a_full_engine_has_its_turn_begun_at_another() -> None:
    """vLLM refuses what its queue has no room for (--max-num-queued-reqs)."""
    async with two(lambda request: Say(refuse=TooManyRequests("full"))) as proxy:
        for trial in TRIALS:
            assert (await proxy.chat(trial, "hello")).status_code == 200
            [turn] = await proxy.turns(trial)
            assert turn.worker_id == "good"
    async with two(lambda request: Say(refuse=TooManyRequests("full")), good=full) as proxy:
        lost = metrics.FAILOVERS.labels("no_worker")._value.get()
        answer = await proxy.chat("t", "hello")
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert metrics.FAILOVERS.labels("no_worker")._value.get() == lost, (
            "an alert says of these that their workers were lost"
        )


def full(request: Generate) -> Say:
    return Say(refuse=TooManyRequests("full"))


@pytest.mark.parametrize("times", [1, 6])
async def test_a_stream_that_is_read_goes_on_at_an_engine_that_was_full_for_a_moment(times: int) -> None:
    """I9: the worker that takes it over is the only one left."""
    refused: list[str] = []

    def full_at_first(request: Generate) -> Say:
        if request.sampled_ids and refused.count(request.trial_id) < times:
            refused.append(request.trial_id)
            return Say(refuse=TooManyRequests("full", retry_after_s=0.01))
        return Say("whole")

    async with two(lambda request: Say("whole", fail_after=2), Able, full_at_first) as proxy:
        for trial in TRIALS:
            assert await streamed(proxy, trial) == ("whole", True)
            turns = await proxy.turns(trial)
            check_drawn(trial, turns)
            assert turns[0].attempt == (1 + times if trial in refused else 0) and not turns[0].partial
    assert refused


async def test_a_stream_whose_engine_stays_full_breaks_after_the_wait_of_queued_requests_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I4, I9: an alert says that turns were lost."""

    def full_to_what_goes_on(request: Generate) -> Say:
        return Say(refuse=TooManyRequests("full", retry_after_s=0.01)) if request.sampled_ids else Say("whole")

    def count(how: str) -> float:
        return float(metrics.FAILOVERS.labels(how)._value.get())

    lost, taken_over, broken = count("no_worker"), count("taken_over"), 0
    async with two(lambda request: Say("whole", fail_after=2), Able, full_to_what_goes_on, queue_s=0.5) as proxy:
        for trial in TRIALS:
            said, ended = await streamed(proxy, trial)
            [turn] = await proxy.turns(trial, at_least=1)
            check_drawn(trial, [turn])
            assert (said, turn.partial) == (("whole", False) if ended else ("wh", True))
            assert ended or (turn.error.startswith("rate_limited") and turn.attempt > 1)
            broken += not ended
    assert broken and (count("no_worker") - lost, count("taken_over") - taken_over) == (broken, broken)
    assert caplog.text.count("can't be resumed after rate_limited: no engine had room within 0.5 s (queue_s)") == broken


async def test_an_engine_that_was_full_when_a_turn_began_takes_it_over_later() -> None:
    """It is the only one that is left."""
    refused: list[str] = []

    def full_at_first(request: Generate) -> Say:
        if not request.sampled_ids and len(request.job.messages) == 1:
            refused.append(request.trial_id)
            return Say(refuse=TooManyRequests("full"))
        return Say("whole")

    async with two(lambda request: Say("whole", fail_after=2), Able, full_at_first) as proxy:
        for trial in TRIALS:
            assert await streamed(proxy, trial) == ("whole", True)
            [turn] = await proxy.turns(trial)
            assert [span.worker_id for span in turn.workers] == ["bad", "good"]
            assert turn.attempt == 1 + (trial in refused)
    assert refused


async def test_a_text_only_upstream_is_asked_once_however_many_workers_it_has() -> None:
    """They are of one provider: 600 s of its silence were 3000, and each try may cost."""
    asked: list[str] = []

    def fails(request: Generate) -> Say:
        asked.append(request.trial_id)
        return Say(refuse=EngineFailed("the upstream answered 503"))

    async with two(fails, lambda script: ParrotEngine(script, text_only=True), fails) as proxy:
        for trial in TRIALS:
            assert (await proxy.chat(trial, "hello", stream=trial in TRIALS[::2])).status_code == 503
    assert sorted(asked) == sorted(TRIALS)


async def test_what_was_sampled_and_not_told_is_recorded_and_begun_anew() -> None:
    async with two(lambda request: Say("broken", fail_after=3)) as proxy:
        restarted = 0
        for trial in TRIALS:
            answer = await proxy.chat(trial, "hello")
            assert answer.json()["choices"][0]["message"]["content"] == "whole"
            *lost, whole = await proxy.turns(trial)
            assert (whole.worker_id, whole.attempt, whole.partial) == ("good", len(lost), False)
            assert answer.json()["id"].endswith(whole.turn_id)
            for turn in lost:
                restarted += 1
                assert (turn.worker_id, turn.attempt, turn.partial) == ("bad", 0, True)
                assert len(turn.completion_ids) == 12 and turn.error.startswith("engine_failed")
                assert whole.retry_of == turn.turn_id and turn.superseded_by == whole.turn_id
                session = await proxy.store.session(trial)
                assert session.counts.completion_tokens == 3 + len(whole.completion_ids) // 4
        assert restarted


async def test_the_retry_of_what_was_begun_anew_in_vain_is_in_place_of_what_was_sampled() -> None:
    """Nor is it taken for one of the identical request that was answered before."""
    fails: list[bool] = []

    def breaks(request: Generate) -> Say:
        return Say("broken", fail_after=3) if fails else Say("whole")

    def refuses(request: Generate) -> Say:
        return Say(refuse=EngineFailed("it is gone")) if fails else Say("whole")

    async with two(breaks, good=refuses) as proxy:
        for trial in TRIALS:
            for status in (200, 503):
                assert (await proxy.chat(trial, "hello")).status_code == status
                fails.append(True)
            first, *lost = await proxy.turns(trial, at_least=2)
            assert lost and lost[-1].partial and lost[-1].superseded_by is None
            fails.clear()
            body = {"messages": [{"role": "user", "content": "hello"}]}
            key = {"authorization": f"Bearer {proxy.agent_key(trial)}"}
            answer = await proxy.http.post(f"/{trial}/v1/chat/completions", json=body, headers=key | AGAIN)
            assert answer.status_code == 200
            *earlier, again = await proxy.turns(trial, at_least=2 + len(lost))
            assert [turn.superseded_by is None for turn in earlier] == [True] + [False] * len(lost)
            assert (again.retry_of, again.partial) == (lost[-1].turn_id, False) and first.superseded_by is None


async def test_a_turn_that_several_workers_sampled_has_each_token_as_it_was_drawn() -> None:
    """I1, I9: one worker gives up after two tokens, in the first turn of a trial and in the next."""
    async with two(lambda request: Say("whole", fail_after=2), Able) as proxy:
        taken_over = 0
        for trial in TRIALS:
            stream = bool(taken_over % 4)
            said = {"role": "assistant", "content": "whole"}
            assert (await proxy.chat(trial, "hello", stream=stream)).status_code == 200
            assert (await proxy.chat(trial, "hello", said, "more", stream=stream)).status_code == 200
            turns = await proxy.turns(trial, at_least=2)
            check_drawn(trial, turns)
            assert turns[1].parent_id == turns[0].turn_id
            for turn in turns:
                assert bytes(turn.completion_ids[::4]) == b"whole\x02" and not turn.partial
                spans = [(span.worker_id, span.start, span.end) for span in turn.workers]
                assert spans in ([], [("bad", 0, 2), ("good", 2, 6)])
                assert turn.attempt == (1 if spans else 0)
                taken_over += bool(spans)
        assert taken_over


async def test_what_was_told_and_cant_be_gone_on_with_breaks() -> None:
    async with two(lambda request: Say("broken", fail_after=3)) as proxy:
        outcomes = {await streamed(proxy, trial) for trial in TRIALS}
        assert outcomes == {("whole", True), ("bro", False)}


async def streamed(proxy: Proxy, trial: str) -> tuple[str, bool]:
    """What an SDK's user sees of a stream: the words, and whether it ended well."""
    said, ended = "", False
    with contextlib.suppress(Exception):
        stream: Any = await proxy.openai(trial).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        async for chunk in stream:
            for choice in chunk.choices:
                said += choice.delta.content or ""
                ended = ended or choice.finish_reason is not None
    return said, ended


async def test_every_choice_of_a_request_goes_on_by_itself() -> None:
    async with two(lambda request: Say("broken", fail_after=2)) as proxy:
        for trial in TRIALS:
            answer = await proxy.chat(trial, "hello", n=2)
            assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["whole", "whole"]


async def test_a_turn_goes_on_at_the_worker_whose_channel_was_lost_once_it_has_another(tmp_path: Path) -> None:
    """Nothing was wrong with it but its network, and it may be the only one."""
    words = " ".join(f"word{number}" for number in range(200))
    script = tmp_path / "script.py"
    script.write_text(
        "asked = []\n\ndef say(request):\n    asked.append(request)\n"  # slowly until it is cut
        f'    return {{"content": {words!r}, "pace_s": 0.05 if len(asked) == 1 else 0.0}}\n'
    )
    fields: dict[str, Any] = {"engine": "scripted", "script": f"{script}:say", "model": str(TINY)}
    async with (
        running(worker=False, resume_grace_s=0.2, queue_s=300) as proxy,
        TcpRelay("127.0.0.1", proxy.port) as network,
    ):
        given = WorkerSettings(proxy=[f"ws://127.0.0.1:{network.port}"], max_backoff_s=0.2, **fields)
        engine = build(given)
        await engine.start()
        worker = Worker(given, engine, WorkerMetrics(CollectorRegistry()))
        task = asyncio.create_task(worker.run())
        await until(proxy.app.state.hub.cards)
        stream: Any = await proxy.openai("t").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True, timeout=300
        )
        said = ""
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if "word10" in said and network.accepting and not proxy.app.state.hub.counts.channels["lost"]:
                network.accepting = False
                network.cut()
                await until(lambda: proxy.app.state.hub.counts.channels["lost"])
                network.accepting = True
        assert said == words
        [turn] = await proxy.turns("t", at_least=1)
        assert not turn.partial and turn.attempt == 1
        assert [span.worker_id for span in turn.workers] == [given.worker_id] * 2
        worker.stop()
        worker.stop()
        await task


@pytest.mark.parametrize("path", ["gemini", "messages"])
async def test_a_stream_of_which_nothing_was_written_begins_anew(path: str) -> None:
    """Calls are told at the end in Gemini's format, and Messages hold back the space that a text begins with."""
    bad = (
        Say("", calls=[("a", "f", "{}"), ("b", "f", "{}")], fail_after=1)
        if path == "gemini"
        else Say("\n\n\n", fail_after=2)
    )
    question = {
        "gemini": ("v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "hello"}]}]}),
        "messages": (
            "v1/messages",
            {"model": "m", "max_tokens": 99, "stream": True, "messages": [{"role": "user", "content": "hello"}]},
        ),
    }
    where, body = question[path]
    async with two(lambda request: bad) as proxy:
        attempts: set[int] = set()
        for trial in TRIALS:
            answer = await proxy.http.post(f"/{trial}/{where}", json=body)
            assert answer.status_code == 200 and "error" not in answer.text
            texts = [event for event in answer.text.splitlines() if '"text":"' in event and '"text":""' not in event]
            assert "\\n" not in "".join(texts) and '"text":"w"' in texts[0]
            attempts.add((await proxy.turns(trial))[-1].attempt)
        assert attempts == {0, 1}


async def test_choices_that_end_because_another_failed_say_so() -> None:
    gate = asyncio.Event()
    engine = ParrotEngine(
        lambda request: Say("whole", fail_after=3) if len(engine.requests) == 2 else Say("other", gates={2: gate})
    )
    async with running(engine) as proxy:
        answer = await proxy.chat("t", "hello", n=2)
        assert answer.status_code == 503
        turns = await proxy.turns("t", at_least=2)
        assert [turn.partial for turn in turns] == [True, True]
        assert {turn.error for turn in turns} == {"engine_failed: the engine has died"}
