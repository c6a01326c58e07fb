"""Workers that say what can't be (I1): refused where it arrives; what older proxies recorded of it is named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from steno.client.client import AsyncClient, Client
from steno.contracts.records import IndexRow, floats_to_bytes, ids_to_bytes
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.wire.frames import Delta, Generate, Started, StreamEvent
from steno_cli.exports.export import ExportFormat, export_sessions
from steno_cli.exports.rows import Records
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from steno_trainer.data.advantages import Estimator
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.ledger import Reason
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.step.assemble import assemble
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import PATIENT
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say, drawn

VOCABULARY = 200_000
Lie = Callable[[StreamEvent, int], None]
"""Changes an event of a worker; the number is of the delta, from 0."""


class Liar(ParrotEngine):
    """A parrot whose events are changed on their way, for trials that `lies` names, or all of them ("")."""

    def __init__(self, lies: dict[str, Lie]) -> None:
        super().__init__(lambda request: Say("hello"), vocabulary_size=VOCABULARY)
        self.lies = lies

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        lie, number = self.lies.get(request.trial_id) or self.lies.get(""), 0
        async for event in super().generate(request):
            if lie is not None:
                lie(event, number)
            number += isinstance(event, Delta)
            yield event


def of_delta(place: int, **fields: bytes) -> Lie:
    """Of one delta: so many sound tokens come before it."""

    def lie(event: StreamEvent, number: int) -> None:
        if isinstance(event, Delta) and number == place:
            for name, value in fields.items():
                setattr(event, name, value)

    return lie


def of_started(**fields: Any) -> Lie:
    def lie(event: StreamEvent, number: int) -> None:
        if isinstance(event, Started):
            law = {name: value for name, value in fields.items() if hasattr(event.law, name)}
            event.law = msgspec.structs.replace(event.law, **law)
            for name in fields.keys() - law.keys():
                setattr(event, name, fields[name])

    return lie


def prompt_of(event: StreamEvent, number: int) -> None:
    if isinstance(event, Started):
        event.new_ids = event.new_ids[:-4] + ids_to_bytes([VOCABULARY])


def logprob(value: float) -> Lie:
    return of_delta(2, logprobs=floats_to_bytes([value]))


LIES: dict[str, tuple[Lie, int, str]] = {  # trial -> what is said, how many tokens are sound, what the error names
    "nan": (logprob(math.nan), 2, "got nan, must be finite and at most"),
    "inf": (logprob(math.inf), 2, "got inf, must be finite and at most"),
    "minus-inf": (logprob(-math.inf), 2, "got -inf, must be finite and at most"),
    "above-0": (logprob(2e-4), 2, "must be finite and at most"),
    "negative-id": (of_delta(2, ids=ids_to_bytes([-5])), 2, "a token id of -5"),
    "far-id": (of_delta(2, ids=ids_to_bytes([VOCABULARY])), 2, f"a token id of {VOCABULARY}"),
    "too-many": (of_delta(2, ids=ids_to_bytes([97] * 9), logprobs=floats_to_bytes([-1.0] * 9)), 2,
                 "more tokens than max_tokens (4)"),
    "digest": (of_started(prompt_digest=bytes(16)), 0, "prompt_digest"),
    "law": (of_started(temperature=math.nan), 0, "law.temperature"),
    "bias": (of_started(logit_bias={1: math.inf}), 0, "law.logit_bias"),
    "prompt": (prompt_of, 0, f"a token id of {VOCABULARY}"),
}  # fmt: skip


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"steno_proxy_{name}_total", labels) or 0.0


async def scraped(proxy: Proxy) -> dict[str, float]:
    assert (await proxy.http.get("/metrics")).status_code == 200
    return {
        "received": counted("received_tokens"),
        "recorded": counted("completion_tokens"),
        "unrecorded": counted("unrecorded_tokens", reason="unsound_output"),
        "late": counted("late_tokens"),
        "unsound": counted("unsound_turns"),
    }


async def test_what_can_not_be_ends_its_turn_and_what_was_sampled_before_is_accounted_for() -> None:
    engine = Liar({trial: lie for trial, (lie, _, _) in LIES.items()})
    async with running(engine) as proxy:
        before = await scraped(proxy)
        for trial, (_, sound, words) in LIES.items():
            answer = await proxy.chat(trial, "hello", max_tokens=4, logprobs=True)
            assert answer.status_code == 503 and words in answer.json()["error"]["message"], (trial, answer.text)
            turns = await proxy.turns(trial)
            assert [turn.completion_tokens for turn in turns] == [sound] * bool(sound), trial
            listed = (await proxy.http.get(f"/sessions/{trial}/samples")).json()
            assert listed["unreadable"] == []
            assert sum(sum(sample["loss_mask"]) for sample in listed["items"]) == sound
        near = await proxy.chat("near-0", "hello", max_tokens=4)
        assert near.status_code == 200
        engine.lies["near-0"] = logprob(5e-5)  # a sum of float32s may round so: taken as it is
        assert (await proxy.chat("near-0", "again", max_tokens=4)).status_code == 200
        recorded = (await proxy.turns("near-0"))[-1]
        first, second, _, last = drawn("near-0", recorded.prompt_tokens, 4)
        assert recorded.sampling_logprobs == floats_to_bytes([first, second, 5e-5, last])
        await until(lambda: not proxy.app.state.hub.workers()[0].in_flight)
        after = await scraped(proxy)
        grew = {name: after[name] - before[name] for name in after}
        assert grew["unsound"] == len(LIES) and grew["unrecorded"] == 6 + 9
        assert grew["received"] == grew["recorded"] + grew["unrecorded"] + grew["late"]  # I4
        ids = await proxy.http.post("/mine/v1/completions", json={"model": "", "prompt": [1, VOCABULARY]})
        assert ids.status_code == 400 and "vocabulary" in ids.text, "an agent's mistake is not its worker's"
        assert counted("unsound_turns") == after["unsound"]
        [view] = (await proxy.http.get("/workers")).json()["items"]
        assert view["suspect"] and (await proxy.chat("honest", "hello")).status_code == 200, "the last worker serves on"


async def test_what_came_late_is_received_and_late_and_told_once(proxy: Proxy) -> None:
    """I4. That each late token is counted as one: `relay/test_hostile.py`."""
    before, counts = await scraped(proxy), proxy.app.state.hub.counts
    counts.tokens, counts.late_tokens = counts.tokens + 5, counts.late_tokens + 3
    for _ in range(2):
        after = await scraped(proxy)
        assert {name: after[name] - before[name] for name in ("received", "late")} == {"received": 8, "late": 3}


@contextlib.asynccontextmanager
async def beside(proxy: Proxy, engine: ParrotEngine, name: str) -> AsyncIterator[None]:
    worker = Worker(
        WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}"], worker_id=name),
        engine,
        WorkerMetrics(CollectorRegistry()),
    )
    task = asyncio.create_task(worker.run())
    await until(lambda: any(view.id == name for view in proxy.app.state.hub.workers()))
    try:
        yield
    finally:
        worker.stop()
        worker.stop()
        await task
        await until(lambda: all(view.id != name for view in proxy.app.state.hub.workers()))


async def test_a_worker_that_does_so_again_and_again_gets_no_new_turns_while_another_takes_them() -> None:
    good, bad = Liar({}), Liar({"": of_delta(0, logprobs=floats_to_bytes([math.nan]))})
    async with running(worker=False) as proxy, beside(proxy, bad, "bad"):
        async with beside(proxy, good, "good"):
            for number in range(40):
                answer = await proxy.chat(f"trial-{number}", "hello")
                assert answer.status_code == 200, "another worker goes on with it (I9)"
                if len(bad.requests) == 3:
                    break
            views = {view["id"]: view for view in (await proxy.http.get("/workers")).json()["items"]}
            assert "nan" in views["bad"]["suspect"] and not views["good"]["suspect"]
            assert "steno_proxy_workers_suspect 1.0" in (await proxy.http.get("/metrics")).text
            for number in range(20):
                assert (await proxy.chat(f"later-{number}", "hello")).status_code == 200
            assert len(bad.requests) == 3
        assert (await proxy.chat("last", "hello")).status_code == 503
        assert len(bad.requests) == 4, "it is the last one"
    async with running(worker=False) as proxy, beside(proxy, Liar({}), "bad"):
        assert not proxy.app.state.hub.workers()[0].suspect


# -- what is on record already


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> SessionStore:
    if request.param == "memory":
        return MemoryStore()
    return RedisStore(request.getfixturevalue("redis_url"), **PATIENT)


async def record(proxy: Proxy, trial: str, **wrong: Any) -> None:
    """A turn as a proxy of revision 30876af would have recorded it: it looked at none of this."""
    [sound] = await proxy.store.turns(trial)
    turn = sound.model_copy(update={"turn_id": "ffffffffffff", "index": -1} | wrong)
    row = IndexRow(
        turn.turn_id, -1, bytes(32), b"", b"", turn.finish_reason, False, turn.prompt_tokens + turn.completion_tokens,
        completion_tokens=turn.completion_tokens,
    )  # fmt: skip
    await proxy.store.commit(trial, turn, row, now=time.time())


async def test_a_record_that_can_not_be_read_is_served_with_the_reason_and_the_trainer_books_it(
    store: SessionStore, tmp_path: Path
) -> None:
    wrong: list[dict[str, Any]] = [
        {"sampling_logprobs": floats_to_bytes([-0.25, math.nan, -0.25, -0.25, math.inf, -math.inf])},
        {"sampling_logprobs": floats_to_bytes([-0.25, 3.0, -0.25, -0.25, -0.25, -0.25])},
        {"prompt_digest": b"0123456789abcdef"},
        {"law": {"temperature": math.nan}},
    ]
    run = uuid.uuid4().hex
    async with running(store=store) as proxy:
        made = await proxy.steno.create_group(GroupSpec(run_id=run, size=len(wrong)))
        trials = [trial.session.trial_id for trial in made.trials]
        for reward, (trial, fields) in enumerate(zip(trials, wrong, strict=True)):
            assert (await proxy.chat(trial, "hello")).status_code == 200
            await record(proxy, trial, **fields)
            for path in ("", "/turns", "/samples"):
                answer = await proxy.http.get(f"/sessions/{trial}{path}")
                assert answer.status_code == 200, (path, answer.text)
                json.loads(answer.content, parse_constant=pytest.fail)
            listed = await proxy.steno.sample_list(trial)
            assert [sample.turn_ids for sample in listed.items] == [[(await store.turns(trial))[0].turn_id]]
            assert [(one.turn_id, one.completion_tokens) for one in listed.unreadable] == [("ffffffffffff", 6)]
            by_itself = [turn.unreadable async for turn in proxy.steno.turns(trial)]
            assert by_itself[0] is None and bool(by_itself[1]) == ("prompt_digest" not in fields)
            await proxy.steno.complete(trial, Completion(reward=float(reward)))
        with Client(proxy.url) as steno:
            for records, rows in ((Records.TURNS, 8), (Records.SAMPLES, 4)):
                file = tmp_path / f"{records}.jsonl"
                args = (steno, trials, file, ExportFormat.JSONL, records)
                assert await asyncio.to_thread(export_sessions, *args) == rows
                assert not {"NaN", "Infinity"} & set(file.read_text().replace(",", " ").replace("]", " ").split())
            for chosen, rows in ((ExportFormat.ATIF, 8), (ExportFormat.CHAT, 8), (ExportFormat.SFT, 4)):
                file = tmp_path / f"of-{chosen}"
                assert await asyncio.to_thread(export_sessions, steno, trials, file, chosen) == rows
        async with AsyncClient(proxy.url) as client, LeaseFeed(client, run_id=run, consumer="t", ahead=1) as feed:
            [leased] = await asyncio.wait_for(feed.take(1), 60)
            terms = TrainingTerms(
                VersionHistory((PolicyVersion("base", 0),)),
                max_staleness_steps=4,
                max_tokens=1000,
                vocabulary=VOCABULARY,
            )
            step = assemble([leased], terms, Estimator.GRPO, Overlong())
            trained = sum(row.trained_tokens for row in step.batch.rows)
            books = step.books.total()
            assert books.untrained == {Reason.UNREADABLE: 6 * len(wrong)}
            assert books.sampled == trained + books.untrained[Reason.UNREADABLE] and trained == 6 * len(wrong)
            await feed.acknowledge([leased.group_id])
