"""Turns and sessions as OpenTelemetry spans, at a receiver that decodes them; and what becomes of them while it is away."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from steno.contracts.errors import ConfigError, EngineFailed
from steno.contracts.rest import Completion, SessionSpec
from steno_proxy import metrics
from steno_proxy.config.settings import ProxySettings
from steno_proxy.tracing import traces as traces_module
from steno_proxy.tracing.content import MOST_CHARS, shown
from steno_proxy.tracing.spans import linked
from steno_proxy.tracing.traces import Traces
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.faults.test_failover import two
from tests.support.machine.collector import Collector, attributes
from tests.support.records.recordings import conversation, session
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(traces_module, "EVERY_S", 0.02)
    monkeypatch.setattr(traces_module, "AGAIN_S", 0.05)
    with Collector() as found:
        yield found


def counted(outcome: str) -> float:
    return metrics.TRACE_SPANS.labels(outcome)._value.get()


async def streamed(proxy: Proxy, trial_id: str, headers: dict[str, str] | None = None) -> None:
    body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}], "stream": True, "temperature": 0.5}
    path = f"/{trial_id}/v1/chat/completions"
    async with proxy.http.stream("POST", path, json=body, headers=headers or {}) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            pass


async def test_a_session_is_a_trace_and_a_streamed_turn_a_span_of_it(collector: Collector) -> None:
    versions = Say("one two", versions=lambda i: "a/1" if i < 3 else "a/2")
    engine = ParrotEngine(lambda request: versions)
    headers = "Authorization=Basic cGs6c2s=, x-langfuse-ingestion-version=4"
    async with running(engine, otel_endpoint=collector.url, otel_headers=headers) as proxy:
        await proxy.steno.register("t", SessionSpec(run_id="r", metadata={"agent": "mini"}))
        await streamed(proxy, "t", {"traceparent": PARENT})
        await proxy.steno.complete("t", Completion(reward=0.5))
        [turn] = await proxy.turns("t", 1)
        await until(lambda: len(collector.spans) == 2)
    [whole], [one] = collector.named("invoke_agent mini"), collector.named("chat mine")
    assert collector.services == {"steno"} and collector.headers[0][":path"] == "/v1/traces"
    assert collector.headers[0]["authorization"] == "Basic cGs6c2s="
    assert one.trace_id == whole.trace_id and one.parent_span_id == whole.span_id and not whole.parent_span_id
    assert (whole.start_time_unix_nano, one.kind) == (one.start_time_unix_nano, Span.SPAN_KIND_CLIENT)
    seen = attributes(one)
    assert seen | {
        "gen_ai.operation.name": "chat", "gen_ai.conversation.id": "t", "gen_ai.request.model": "mine",
        "gen_ai.response.id": turn.turn_id, "gen_ai.response.finish_reasons": ["stop"], "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": turn.prompt_tokens, "gen_ai.usage.output_tokens": turn.completion_tokens,
        "steno.run_id": "r", "steno.versions": ["a/1", "a/2"],
    } == seen  # fmt: skip
    assert (one.end_time_unix_nano - one.start_time_unix_nano) / 1e9 == pytest.approx(
        turn.timings.last_token - turn.timings.queued, abs=1e-6
    )
    assert 0 < seen["gen_ai.response.time_to_first_chunk"] < 20
    [update] = one.events
    assert (update.name, attributes(update)["steno.token"]) == ("steno.update", 3)
    assert one.start_time_unix_nano < update.time_unix_nano <= one.end_time_unix_nano
    [link] = one.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert attributes(whole)["steno.reward"] == 0.5
    words = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in attributes(one) | attributes(whole) if name.startswith("gen_ai.")} <= words
    assert not {"gen_ai.input.messages", "gen_ai.output.messages"} & seen.keys(), "nobody asked for content"


async def test_content_is_sent_where_it_is_asked_for(collector: Collector) -> None:
    calls = [("own", "find", '{"x": 1}')]
    engine = ParrotEngine(lambda request: Say("so", reasoning="hm", calls=calls))
    async with running(engine, otel_endpoint=collector.url + "/", otel_content=True) as proxy:
        await proxy.chat("t", {"role": "system", "content": "be brief"}, "hello")
        await until(lambda: collector.spans)
    seen = attributes(collector.spans[0])
    asked, said = json.loads(seen["gen_ai.input.messages"]), json.loads(seen["gen_ai.output.messages"])
    assert asked == [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {"role": "user", "parts": [{"type": "text", "content": "hello"}]},
    ]
    [reply] = said
    assert [part["type"] for part in reply["parts"]] == ["reasoning", "text", "tool_call"]
    assert (reply["finish_reason"], reply["parts"][2]["name"]) == ("tool_calls", "find")


async def test_retried_and_failed_over_turns_say_so(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ProxySettings

    def traced(**given: Any) -> ProxySettings:
        return real(otel_endpoint=collector.url, **given)

    monkeypatch.setattr("tests.integration.http.conftest.ProxySettings", traced)
    async with two(lambda request: Say("broken", fail_after=3)) as proxy:
        turns: list[Any] = []
        for number in range(40):
            await proxy.chat(f"trial-{number}", "hello")
            turns += await proxy.turns(f"trial-{number}", 1)
            if len(turns) > number + 1:
                break  # one met the bad worker
        lost = turns[-2]
        await until(lambda: len(collector.spans) == len(turns))
    spans = {attributes(span)["gen_ai.response.id"]: span for span in collector.spans}
    assert spans.keys() == {turn.turn_id for turn in turns}, "every turn on record has its span, and each once"
    broken, whole = spans[lost.turn_id], spans[turns[-1].turn_id]
    assert broken.status.code == Status.STATUS_CODE_ERROR and attributes(broken)["error.type"] == "engine_failed"
    assert attributes(whole)["steno.attempt"] == 1 and whole.status.code == Status.STATUS_CODE_UNSET
    events = {event.name: attributes(event) for event in whole.events}
    assert events["steno.retry"] == {"steno.retry_of": lost.turn_id}
    move = events["steno.failover"]
    assert (move["steno.how"], move["error.type"], move["steno.worker_id"]) == ("restarted", "engine_failed", "bad")


async def test_a_refused_request_is_a_span_and_a_turn_that_breaks_is_no_refusal(collector: Collector) -> None:
    says = [Say("fine"), Say(refuse=EngineFailed("no")), Say("part", fail_after=2)]
    engine = ParrotEngine(lambda request: says[min(len(engine.requests), 3) - 1])
    async with running(engine, otel_endpoint=collector.url) as proxy:
        await proxy.chat("t", "hello")
        assert (await proxy.chat("t", "hello", temperature=-1)).status_code == 400
        await until(lambda: len(collector.spans) == 2)
        [refused] = collector.named("refused ")
        assert (refused.name, attributes(refused)["http.response.status_code"]) == ("refused invalid_request", 400)
        assert "temperature" in attributes(refused.events[0])["steno.message"]
        assert refused.trace_id == collector.named("chat")[0].trace_id


async def test_nothing_is_lost_while_the_collector_is_away_for_a_while(collector: Collector) -> None:
    sent = counted("sent")
    async with running(otel_endpoint=collector.url) as proxy:
        collector.__exit__()
        for number in range(5):
            async with asyncio.timeout(60):  # no turn waits for it
                await proxy.chat(f"t{number}", "hello")
        collector.status = 503
        with collector:
            await until(lambda: collector.headers)
            await proxy.chat("t5", "hello")
            collector.status = 200
            await until(lambda: len(collector.spans) >= 6)
            assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 6
            await until(lambda: counted("sent") == sent + 6)
        collector.__enter__()


async def test_spans_that_are_refused_for_good_do_not_hold_back_others(collector: Collector) -> None:
    refused = counted("refused")
    collector.status = 401
    async with running(otel_endpoint=collector.url) as proxy:
        await proxy.chat("t", "hello")
        await until(lambda: counted("refused") == refused + 1)
        collector.status = 200
        await proxy.chat("u", "hello")
        await until(lambda: collector.spans)
        assert attributes(collector.spans[0])["gen_ai.conversation.id"] == "u"


async def test_the_end_of_a_proxy_sends_what_waits(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "EVERY_S", 60.0)
    async with running(otel_endpoint=collector.url) as proxy:
        await proxy.chat("t", "hello")
        assert not collector.spans
    assert len(collector.spans) == 1


class Deaf:
    """A collector that nobody reaches."""

    def __init__(self) -> None:
        self.asked = 0

    def send(self, spans: Any) -> int | None:
        self.asked += 1
        return 0

    def close(self) -> None:
        """Nothing waits."""


def test_of_what_finds_no_room_the_oldest_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "EVERY_S", 0.0)
    dropped, exporter = counted("dropped"), Deaf()
    traces = Traces(exporter, most=10)
    one, (turn, _) = session("t"), conversation(1)[0]
    for _ in range(25):
        traces.turn(one, turn)
    assert counted("dropped") == dropped + 15
    traces.start()
    traces.close(10.0)
    assert counted("dropped") == dropped + 25, "what was never sent is dropped, and said to be"


def test_handing_over_costs_next_to_nothing() -> None:
    traces = Traces(Deaf(), most=8192)
    one, (turn, _) = session("t"), conversation(1)[0]
    gc.disable()  # a full collection looks at all that these tests hold
    try:
        began = time.thread_time()
        for _ in range(10_000):
            traces.turn(one, turn)
        took_s = time.thread_time() - began
    finally:
        gc.enable()
    assert took_s / 10_000 < 50e-6


@pytest.mark.parametrize(
    "said",
    ["", "00-0-0-01", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ff-" + PARENT[3:], PARENT + "-more", "\x00" * 55],
)
def test_a_traceparent_that_is_none_links_nothing(said: str) -> None:
    assert linked(said) is None


def test_long_content_is_cut_and_stays_json() -> None:
    messages = [
        {"role": "user", "content": "x" * 1_000_000},
        {"role": "tool", "tool_call_id": "c", "content": "y" * 100_000},
    ]
    found = json.loads(said := shown(messages))
    assert len(said) <= MOST_CHARS and "characters left out" in found[0]["parts"][0]["content"]
    assert found[1]["parts"][0]["id"] == "c"
    many = [{"role": "user", "content": "z" * 200} for _ in range(1000)]
    assert "1000 messages" in shown(many) and len(shown(many)) < MOST_CHARS


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"otel_headers": "a=b"}, "otel_endpoint"), ({"otel_content": True}, "otel_endpoint"),
        ({"otel_endpoint": "http://c:4318", "otel_headers": "nonsense"}, "otel_headers"),
        ({"otel_endpoint": "http://c:4318", "otel_headers": "a=b\r\nc: d"}, "otel_headers"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProxySettings(**given).check()
    assert refused.value.field == field


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c", "http://user:key@c", "http://c?x=1"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="otel_endpoint"):
        ProxySettings(otel_endpoint=url)


async def test_what_is_not_installed_is_named_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "missing", lambda names: "opentelemetry")
    with pytest.raises(ConfigError, match=r"\[otel\]") as refused:
        async with running(otel_endpoint="http://c:4318"):
            await asyncio.sleep(0)
    assert refused.value.field == "otel_endpoint"
