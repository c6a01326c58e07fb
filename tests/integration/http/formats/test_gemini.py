"""Google's own SDK, unmodified, against a running proxy: what it gets, and what is on record."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from prometheus_client import REGISTRY, CollectorRegistry

from steno.contracts.errors import ContextOverflow
from steno.contracts.records import IndexRow, Turn
from steno.contracts.wire.frames import Generate
from steno_proxy.store.interface import RetryKey
from steno_proxy.store.memory.store import MemoryStore
from steno_worker.config import WorkerSettings
from steno_worker.main import Worker
from steno_worker.metrics import WorkerMetrics
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

ADMIN = "an-admin-key-that-is-long-enough"
DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(name="look", parameters={"type": "OBJECT", "properties": {"at": {"type": "STRING"}}}),
        types.FunctionDeclaration(name="count", parameters_json_schema={"type": "object"}),
    ]
)


def client(proxy: Proxy, trial_id: str, key: str = "none", **options: Any) -> genai.client.AsyncClient:
    at = types.HttpOptions(base_url=f"{proxy.url}/{trial_id}", timeout=60_000, **options)
    return genai.Client(api_key=key, http_options=at).aio


def script(request: Generate) -> Say:
    """Two calls at once for "look", one answer for each result, an echo for the rest."""
    last = request.job.messages[-1]
    if last["role"] == "tool":
        return Say(f"seen {last['content']}")
    if "look" in last["content"]:
        return Say("I look.", "Hm.", [("own-a", "look", '{"at": "x"}'), ("own-b", "count", "{}")])
    return Say("You say:\n" + last["content"], "Hm.")


def branches(turns: list[Turn]) -> list[str | None]:
    """Each turn's parent is the one before it: one branch."""
    assert [turn.fork_reason for turn in turns] == [None] * len(turns)
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    return [turn.finish_reason for turn in turns]


async def test_an_answer_in_one_piece_is_on_record(proxy: Proxy) -> None:
    answer = await client(proxy, "t").models.generate_content(
        model="gemini-9", contents="hi", config={"temperature": 0.5, "system_instruction": "be brief"}
    )
    [turn] = await proxy.turns("t")
    assert answer.text == "hello"
    assert (turn.dialect, turn.model, turn.asked) == ("gemini", "gemini-9", {"temperature": 0.5})
    assert answer.response_id == turn.turn_id
    assert answer.usage_metadata is not None
    assert answer.usage_metadata.total_token_count == turn.prompt_tokens + len(turn.completion_ids) // 4
    assert [message["role"] for message in turn.messages] == ["system", "user"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_chat_with_function_calls_is_one_branch(streamed: bool) -> None:
    async with running(ParrotEngine(script)) as proxy:
        config = types.GenerateContentConfig(
            tools=[DECLARED], thinking_config=types.ThinkingConfig(include_thoughts=True)
        )
        chat = client(proxy, "t").chats.create(model="m", config=config)

        async def say(message: Any) -> list[types.GenerateContentResponse]:
            if streamed:
                return [chunk async for chunk in await chat.send_message_stream(message)]
            return [await chat.send_message(message)]

        await say("one")
        called = [call for chunk in await say("look there") for call in chunk.function_calls or []]
        assert [call.name for call in called] == ["look", "count"]
        results = [
            types.Part.from_function_response(name=call.name or "", response={"output": call.name}) for call in called
        ]
        answers = await say(results)
        assert "".join(chunk.text or "" for chunk in answers) == "seen count"
        await say("two")
        turns = await proxy.turns("t", at_least=4)
        assert branches(turns) == ["stop", "tool_calls", "stop", "stop"]
        ids = [message["tool_call_id"] for message in turns[2].messages]
        assert ids == [
            f"fc_{turns[1].turn_id}_{i}" for i in range(2)
        ]  # from the place among the calls: the SDK gives none
        worker = proxy.engine.requests[2]
        assert [message["tool_call_id"] for message in worker.job.messages[worker.prefix_messages :]] == [
            "own-a",
            "own-b",
        ]


async def test_the_sdk_calls_python_functions_by_itself() -> None:
    places: list[str] = []

    def look(at: str) -> str:
        """Look somewhere."""
        places.append(at)
        return f"nothing at {at}"

    def reply(request: Generate) -> Say:
        done = sum(message["role"] == "tool" for message in request.job.messages)
        return Say(calls=[("", "look", f'{{"at": "{done}"}}')]) if done < 3 else Say("done")

    async with running(ParrotEngine(reply)) as proxy:
        answer = await client(proxy, "t").models.generate_content(
            model="m", contents="look around", config=types.GenerateContentConfig(tools=[look])
        )
        assert (answer.text, places) == ("done", ["0", "1", "2"])
        assert branches(await proxy.turns("t", at_least=4)) == ["tool_calls"] * 3 + ["stop"]


@pytest.mark.parametrize("dropped", [("id",), ("id", "thoughtSignature")])
async def test_recognition_needs_no_ids(dropped: tuple[str, ...]) -> None:
    async with running(ParrotEngine(script)) as proxy:
        contents: list[Any] = [{"role": "user", "parts": [{"text": "look"}]}]
        for _ in range(3):
            answer = await proxy.http.post("/t/v1beta/models/m:generateContent", json={"contents": contents})
            said = answer.json()["candidates"][0]["content"]
            for part in said["parts"]:
                for name in dropped:
                    part.pop(name, None)
                    part.get("functionCall", {}).pop(name, None)
            names = [part["functionCall"]["name"] for part in said["parts"] if "functionCall" in part]
            results = [{"functionResponse": {"name": name, "response": {"n": 1}}} for name in names]
            contents += [said, {"role": "user", "parts": results or [{"text": "look again"}]}]
        turns = await proxy.turns("t", at_least=3)
        assert branches(turns) == ["tool_calls", "stop", "tool_calls"]
        worker = proxy.engine.requests[1]
        assert [message["tool_call_id"] for message in worker.job.messages[worker.prefix_messages :]] == [
            "own-a",
            "own-b",
        ]
        assert worker.prefix_ids == turns[0].new_prompt_ids + turns[0].completion_ids


async def test_a_stream_of_candidates_and_thoughts() -> None:
    async with running(ParrotEngine(lambda request: Say("yes", "why"))) as proxy:
        config = {
            "candidate_count": 2,
            "thinking_config": {"include_thoughts": True},
            "response_logprobs": True,
            "logprobs": 1,
        }
        seen: dict[tuple[int, bool], str] = {}
        usage = None
        async for chunk in await client(proxy, "t").models.generate_content_stream(
            model="m", contents="?", config=config
        ):
            usage = chunk.usage_metadata or usage
            for candidate in chunk.candidates or []:
                for part in candidate.content.parts if candidate.content else []:
                    key = (candidate.index or 0, bool(part.thought))
                    seen[key] = seen.get(key, "") + (part.text or "")
        assert seen == {(i, thought): text for i in range(2) for thought, text in ((True, "why"), (False, "yes"))}
        assert usage is not None and (usage.thoughts_token_count, usage.candidates_token_count) == (6, 8)
        assert len(await proxy.turns("t", at_least=2)) == 2


async def test_without_alt_sse_a_stream_is_one_json_array(proxy: Proxy) -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    answer = await proxy.http.post("/t/v1beta/models/m:streamGenerateContent", json=body)
    assert answer.headers["content-type"].startswith("application/json")
    texts = [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in answer.json()]
    assert "".join(texts) == "hello" and len(texts) == 6
    events = await proxy.http.post("/t/v1beta/models/m:streamGenerateContent?alt=sse", json=body)
    assert events.headers["content-type"].startswith("text/event-stream")
    assert events.text.count("data: ") == 6


async def test_silence_is_filled_with_what_the_sdk_overlooks() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("hello", gates={3: gate})), keepalive_s=0.05) as proxy:
        text = ""
        async for chunk in await client(proxy, "t").models.generate_content_stream(model="m", contents="?"):
            text += chunk.text or ""
            if text == "hel" and not gate.is_set():
                asyncio.get_running_loop().call_later(0.3, gate.set)
        assert text == "hello"


async def test_a_call_is_seen_only_once_its_turn_is_on_record() -> None:
    class Slow(MemoryStore):
        may = asyncio.Event()
        asked = asyncio.Event()

        async def commit(
            self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
        ) -> int:
            self.asked.set()
            await self.may.wait()
            return await super().commit(trial_id, turn, row, now=now, retry_key=retry_key)

    store = Slow()
    async with running(ParrotEngine(lambda request: Say("I look.", calls=[("", "look", "{}")])), store=store) as proxy:
        chunks: list[types.GenerateContentResponse] = []

        async def read() -> None:
            async for chunk in await client(proxy, "t").models.generate_content_stream(model="m", contents="?"):
                chunks.append(chunk)

        reading = asyncio.create_task(read())
        await store.asked.wait()
        await until(lambda: "".join(chunk.text or "" for chunk in chunks) == "I look.")
        assert [chunk.function_calls for chunk in chunks] == [None] * len(chunks)
        store.may.set()
        await reading
        assert [call.name for call in chunks[-1].function_calls or []] == ["look"]


async def test_a_broken_stream_is_an_error_and_what_was_said_is_kept() -> None:
    async with running(ParrotEngine(lambda request: Say("hello", fail_after=2))) as proxy:
        text = ""
        with pytest.raises(Exception, match=r"peer closed|not completed"):
            async for chunk in await client(proxy, "t").models.generate_content_stream(model="m", contents="?"):
                text += chunk.text or ""
        [turn] = await proxy.turns("t", at_least=1)
        assert (text, turn.partial, turn.finish_reason, turn.delivered) == ("he", True, "error", 2)


async def test_a_stream_that_breaks_says_so_by_itself_before_the_connection_does() -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with running(ParrotEngine(lambda request: Say("hello", fail_after=2))) as proxy:
        reads: list[bytes] = []
        path = "/t/v1beta/models/m:streamGenerateContent?alt=sse"
        with pytest.raises(httpx.RemoteProtocolError):
            async with proxy.http.stream("POST", path, json=body) as answer:
                async for read in answer.aiter_raw():
                    reads.append(read)
        assert json.loads(reads[-1])["error"]["status"] == "UNAVAILABLE"
        array: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            async with proxy.http.stream("POST", path.partition("?")[0], json=body) as answer:
                async for read in answer.aiter_raw():
                    array.append(read)
        assert array and b"error" not in b"".join(array)


async def test_keys_by_header_and_by_query_and_none_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(admin_key=ADMIN) as proxy:
        await proxy.steno.register("t")
        key, other = proxy.agent_key("t"), proxy.agent_key("other")
        assert (await client(proxy, "t", key).models.generate_content(model="m", contents="hi")).text == "hello"
        body = {"contents": [{"parts": [{"text": "hi"}]}]}
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as bare:
            path = "/t/v1beta/models/m:generateContent"
            for query, status in (
                (f"?key={key}", 200),
                (f"?key={other}", 403),
                ("?key=", 401),
                ("?key=%ff%c3", 401),
                ("", 401),
            ):
                answer = await bare.post(path + query, json=body)
                assert answer.status_code == status, query
            refused = answer.json()["error"]
            assert (refused["code"], refused["status"]) == (401, "UNAUTHENTICATED")
            assert (await bare.get(f"/t/v1beta/models?key={key}")).status_code == 200
            assert (await bare.get("/t/v1beta/models")).status_code == 401
            assert (await bare.post("/t/v1beta/models/m:countTokens", json=body)).status_code == 401
            header = {"x-goog-api-key": key}
            assert (await bare.post(path + "?key=wrong", json=body, headers=header)).status_code == 200
        with pytest.raises(errors.ClientError) as raised:
            await client(proxy, "t", other).models.generate_content(model="m", contents="hi")
        assert (raised.value.code, raised.value.status) == (403, "PERMISSION_DENIED")
    steno = [record.getMessage() for record in caplog.records if record.name.startswith(("proxy", "uvicorn"))]
    assert [message for message in steno if key in message or other in message] == []


async def test_counting_leaves_no_trace(proxy: Proxy) -> None:
    counted = await client(proxy, "nobody").models.count_tokens(model="m", contents="hi there")
    assert counted.total_tokens == 1 + len("user:hi there")
    assert (await proxy.http.get("/sessions/nobody")).status_code == 404
    bad = await proxy.http.post("/nobody/v1beta/models/m:countTokens", json={"contents": []})
    assert (bad.status_code, bad.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert proxy.engine.requests == []


async def test_models_in_the_shape_of_whoever_asks(proxy: Proxy) -> None:
    for version in ("v1beta", "v1"):
        google = client(proxy, "t", api_version=version)
        [model] = [model async for model in await google.models.list()]
        assert (model.name, model.input_token_limit) == ("models/parrot", 10_000_000)
        assert (await google.models.get(model="parrot")).display_name == "parrot"
        assert (await google.models.get(model="gemini-any")).input_token_limit == model.input_token_limit
    assert [model.id async for model in proxy.openai("t").models.list()] == ["parrot"]


async def test_every_version_of_the_path_leads_here(proxy: Proxy) -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    for version in ("/v1beta", "/v1", "/v1alpha", "/v1/v1beta", ""):
        answer = await proxy.http.post(f"/t{version}/models/org/name:8b:generateContent", json=body)
        assert (answer.status_code, answer.json()["modelVersion"]) == (200, "org/name:8b")
    assert (await proxy.http.post("/t/v1beta/models/m:embedContent", json=body)).status_code == 404
    assert (await proxy.http.post("/no%20trial/v1beta/models/m:generateContent", json=body)).status_code == 404


async def test_refusals_in_googles_words() -> None:
    overflow = ContextOverflow("too long", prompt_tokens=9, context_tokens=8, field="messages")
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        with pytest.raises(errors.ClientError, match="input token count \\(9\\) exceeds"):
            await client(proxy, "t").models.generate_content(model="m", contents="hi")
    async with running(worker=False) as proxy:
        with pytest.raises(errors.ServerError) as raised:
            await client(proxy, "t").models.generate_content(model="m", contents="hi")
        assert (raised.value.code, raised.value.status) == (503, "UNAVAILABLE")
        body = {"contents": [{"parts": [{"text": "hi"}]}]}
        for action in ("generateContent", "countTokens"):
            answer = await proxy.http.post(f"/t/v1beta/models/m:{action}", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_the_sdk_retries_a_503_by_itself() -> None:
    def refused() -> float:
        labels = {"dialect": "gemini", "status": "503"}
        return REGISTRY.get_sample_value("steno_proxy_requests_total", labels) or 0.0

    before = refused()
    async with running(worker=False) as proxy:
        retrying = client(
            proxy, "t", retry_options=types.HttpRetryOptions(attempts=60, initial_delay=0.1, max_delay=0.5)
        )
        asking = asyncio.create_task(retrying.models.generate_content(model="m", contents="hi"))
        await until(lambda: refused() > before)
        settings = WorkerSettings(proxy=[f"ws://127.0.0.1:{proxy.port}"])
        worker = asyncio.create_task(Worker(settings, proxy.engine, WorkerMetrics(CollectorRegistry())).run())
        assert (await asking).text == "hello"
        assert len(await proxy.turns("t")) == 1
        worker.cancel()
        await asyncio.wait({worker})


def left_out() -> float:
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(
        s.value for s in samples if s.name == "steno_proxy_dropped_items_total" and s.labels["dialect"] == "gemini"
    )


async def test_what_is_left_out_is_counted(proxy: Proxy) -> None:
    before = left_out()
    parts = [{"text": "hi"}, {"executableCode": {"language": "PYTHON", "code": "1"}}]
    body = {"contents": [{"parts": parts}], "tools": [{"googleSearch": {}}, {"functionDeclarations": [{"name": "f"}]}]}
    assert (await proxy.http.post("/t/v1beta/models/m:generateContent", json=body)).status_code == 200
    assert left_out() - before == 2
