"""A model that gives text and no token ids: its frames, its transcript, its record, and that nothing of it is ever trained."""

from __future__ import annotations

import time

import pytest

from steno.contracts.chat import CanonicalRequest, Job, Sampling, ToolCallPiece
from steno.contracts.errors import Conflict, EngineFailed, ProtocolError, TooManyRequests
from steno.contracts.records import Session, Turn, ids_to_bytes
from steno.contracts.wire.frames import Delta, Failed, Finish, ModelCard, Started
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.sessions.samples import samples
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.continuation import plan
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.turns.turn_record import TurnFacts, turn_of
from steno_proxy.workers.placement import Order
from steno_proxy.workers.stream import MAX_RETRY_AFTER_S, Stream, rebuild

CARD = ModelCard("upstream", 1000, text_only=True)
FINISH = Finish(1, "stop", 7, prompt_tokens=30, reasoning_tokens=2, cached_tokens=12)


def open_stream(card: ModelCard = CARD) -> Stream:
    stream = Stream(1, "w", card, 100, 0, lambda frame: None, lambda number: None)
    stream.deliver(Started(1, 0, b"", 0, b"", Sampling()))
    return stream


def said(*events: Delta | Finish, dropped: list[str] | None = None) -> ChoiceTranscript:
    transcript = ChoiceTranscript("0123456789ab", "call", CARD)
    for event in [Started(1, 0, b"", 0, b"", Sampling(temperature=0.5), dropped=dropped or []), *events]:
        transcript.take(event)
    return transcript


async def recorded(store: MemoryStore, transcript: ChoiceTranscript, error: EngineFailed | None = None) -> Turn:
    """Through the store and back."""
    now = time.time()
    recorder = Recorder(store, cache_bytes=2**20, implicit=True)
    recording = await recorder.enter("trial")
    asked = CanonicalRequest("chat", "m", Job(messages=[{"role": "user", "content": "hi"}]))
    found = await plan(recorder, recording, asked.job, Pace())
    facts = TurnFacts(asked, {}, now)
    order = Order("trial", transcript.turn_id, asked.job)
    choice = OpenChoice(recorder, recording, 0, order, open_stream(), transcript, facts, found)
    turn, row = turn_of(recording, choice, error, transcript.delivered)
    await recorder.commit(recording, turn, row)
    return (await store.turns("trial"))[-1]


def test_a_stream_takes_text_without_ids_and_the_upstreams_own_count() -> None:
    stream = open_stream()
    stream.deliver(Delta(1, b"", b"", "", "hello"))
    stream.deliver(FINISH)
    assert stream.ended and stream.received_tokens == 0


def test_a_text_only_model_that_sends_ids_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError):
        open_stream().deliver(Delta(1, ids_to_bytes([5]), b"", "", "x"))


@pytest.mark.parametrize(
    "end",
    [
        Finish(1, "stop", -1),
        Finish(1, "stop", 1, prompt_tokens=2**31),
        Finish(1, "stop", 1, reasoning_tokens=-1),
        Finish(1, "stop", 1, cached_tokens=-1),
    ],
)
async def test_impossible_counts_of_an_upstream_end_that_turn_and_not_the_workers_channel(end: Finish) -> None:
    stream = open_stream()
    await stream.next()  # Started
    stream.deliver(end)
    with pytest.raises(EngineFailed, match="token counts"):
        await stream.next()


def test_any_other_model_must_count_what_it_sent() -> None:
    with pytest.raises(ProtocolError):
        open_stream(ModelCard("m", 100)).deliver(FINISH)


def test_the_client_is_told_the_upstreams_usage() -> None:
    choice = said(Delta(1, b"", b"", "", "hello"), FINISH).choice(0)
    assert (choice.prompt_tokens, choice.completion_tokens) == (30, 7)
    assert (choice.reasoning_tokens, choice.cached_tokens) == (2, 12)


async def test_the_record_has_the_message_and_the_count_and_no_ids() -> None:
    call = ToolCallPiece(0, '{"a": 1}', "toolu_1", "look")
    store = MemoryStore()
    turn = await recorded(store, said(Delta(1, b"", b"", "", "hello", "why", [call]), FINISH, dropped=["seed"]))
    assert turn.reply["content"] == "hello" and turn.reply["reasoning_content"] == "why"
    assert turn.call_ids == {"call_0123456789ab_0": "toolu_1"}
    assert turn.completion_ids == turn.sampling_logprobs == turn.new_prompt_ids == b""
    assert turn.upstream_tokens == turn.completion_tokens == 7 and turn.prompt_tokens == 30
    assert turn.versions == [] and turn.constrained == [] and turn.options["dropped"] == ["seed"]
    counts = (await store.session("trial")).counts
    assert (counts.completion_tokens, counts.prompt_tokens) == (7, 0)


async def test_a_text_only_turn_that_broke_says_that_nobody_counted_it_and_can_be_gone_on_from() -> None:
    store = MemoryStore()
    turn = await recorded(store, said(Delta(1, b"", b"", "", "hel")), EngineFailed("gone"))
    assert turn.partial and turn.upstream_tokens is None and turn.delivered is None
    (row,) = (await store.tail("trial", 0)).rows
    assert row.completion_tokens is None


async def test_there_are_no_samples_of_a_text_only_session() -> None:
    with pytest.raises(Conflict, match="text_only"):
        samples(Session(trial_id="t", marks=["text_only"], created_at=0, updated_at=0), [])


@pytest.mark.parametrize(
    ("said_s", "expected"), [(7.5, 7.5), (0, 0), (MAX_RETRY_AFTER_S + 1, 1.0), (-1, 1.0), ("x", 1.0)]
)
def test_a_worker_says_when_to_come_back(said_s: object, expected: float) -> None:
    error = rebuild(Failed(1, "rate_limited", "slowly", detail={"retry_after_s": said_s}))
    assert isinstance(error, TooManyRequests) and error.retry_after_s == expected


def test_what_retrying_does_not_help_has_no_time_to_come_back_at() -> None:
    assert rebuild(Failed(1, "invalid_request", "no", detail={"retry_after_s": 3})).retry_after_s is None
