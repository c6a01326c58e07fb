"""Spans that are not taken: those that no collector will ever take hold back no others, and an outage loses none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from steno_proxy import metrics
from steno_proxy.tracing import traces as module
from steno_proxy.tracing.exporter import UNSENT
from steno_proxy.tracing.otlp import OtlpExporter
from steno_proxy.tracing.seen import SeenEnd, SeenTurn
from steno_proxy.tracing.spans import resource, span_of
from steno_proxy.tracing.traces import AT_ONCE, TRIES, Traces
from tests.support.programs.ports import free_port
from tests.support.records.recordings import conversation, session


class Refusing:
    """An exporter that answers as it is told, for the trials of a request. taken: the trials whose spans it took."""

    def __init__(self, answer: Callable[[set[str]], int | None]) -> None:
        self.answer = answer
        self.asked = 0
        self.taken: list[str] = []

    def send(self, spans: Sequence[ReadableSpan]) -> int | None:
        self.asked += 1
        assert self.asked < 200, "the same spans are sent for ever"
        trials = [str((span.attributes or {})["gen_ai.conversation.id"]) for span in spans]
        if (said := self.answer(set(trials))) is None:
            self.taken += trials
        return said

    def close(self) -> None:
        """Nothing waits."""


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)


def counted() -> dict[str, float]:
    return {name: metrics.TRACE_SPANS.labels(name)._value.get() for name in ("sent", "refused", "dropped")}


def sent(exporter: Refusing, *trials: str, most: int = 8192) -> dict[str, float]:
    """A request for each of these trials. Returns: how many spans were counted as what."""
    before, traces = counted(), Traces(exporter, most=most)
    for trial in trials:
        for _ in range(AT_ONCE):
            traces.ended(session(trial))
    traces._send_all()
    assert not traces._waiting
    return {name: (now - before[name]) / AT_ONCE for name, now in counted().items()}


@pytest.mark.parametrize("status", [0, 500, 503])
def test_spans_that_are_never_taken_hold_back_no_others(status: int) -> None:
    exporter = Refusing(lambda trials: status if trials & {"bad", "worse"} else None)
    assert sent(exporter, "bad", "worse", "one", "two") == {"sent": 2, "refused": 2, "dropped": 0}
    assert exporter.taken == ["one"] * AT_ONCE + ["two"] * AT_ONCE
    assert exporter.asked == 2 + 2 * 2 * TRIES


def test_an_outage_loses_nothing_that_has_room() -> None:
    exporter = Refusing(lambda trials: 503 if exporter.asked < 100 else None)
    assert sent(exporter, "a", "b", "c") == {"sent": 3, "refused": 0, "dropped": 0}
    assert set(exporter.taken) == {"a", "b", "c"}


def test_spans_that_nobody_has_taken_are_tried_for_ever_where_no_others_are() -> None:
    exporter = Refusing(lambda trials: 500 if exporter.asked < 100 else None)
    assert sent(exporter, "a") == {"sent": 1, "refused": 0, "dropped": 0}


def test_in_a_full_queue_the_oldest_are_dropped() -> None:
    new = ["b", "c"]

    def answer(trials: set[str]) -> int | None:
        if new and exporter.asked % TRIES == 1:  # others come meanwhile
            for _ in range(AT_ONCE):
                traces.ended(session(new[0]))
            new.pop(0)
        return 503 if exporter.asked < 10 else None

    exporter, before = Refusing(answer), counted()
    traces = Traces(exporter, most=AT_ONCE)
    for _ in range(AT_ONCE):
        traces.ended(session("a"))
    traces._send_all()
    assert exporter.taken == ["c"] * AT_ONCE
    assert counted()["dropped"] - before["dropped"] == 2 * AT_ONCE


def test_spans_that_can_not_be_sent_are_refused_at_once() -> None:
    exporter = Refusing(lambda trials: UNSENT if "bad" in trials else None)
    assert sent(exporter, "bad", "good") == {"sent": 1, "refused": 1, "dropped": 0}
    assert exporter.asked == 2


def test_the_exporter_says_whether_anything_was_asked() -> None:
    spans = [span_of(SeenEnd(session("t")), resource(), content=False)]
    exporter = OtlpExporter(f"http://127.0.0.1:{free_port()}", {}, 1.0)
    assert exporter.send(spans) == 0, "nobody answered"
    assert exporter.send([cast(Any, object())]) == UNSENT, "it can't be encoded"
    exporter._exporter._max_request_size = 10
    assert exporter.send(spans) == UNSENT, "it is too large"
    exporter.close()
    assert exporter.send(spans) == 0, "spans that are left at the end are no bad ones"


def test_long_stop_strings_are_cut() -> None:
    turn, _ = conversation(1)[0]
    turn = turn.model_copy(update={"law": turn.law | {"stop": ["END", "x" * 2_000_000]}})
    span = span_of(SeenTurn(session("t"), turn, "", ()), resource(), content=False)
    end, long = cast(Any, span.attributes)["gen_ai.request.stop_sequences"]
    assert end == "END" and len(long) < 400 and "characters left out" in long
