"""One turn, seen from both ends: what the agent gets, and what is on record, when all goes well and when it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from proxy.contracts.errors import BadRequest, ContextOverflow, StoreUnavailable
from proxy.contracts.records import IndexRow, Turn, bytes_to_floats, bytes_to_ids
from proxy.store.base import Asked, Path
from proxy.store.memory import MemoryStore
from tests.integration.http.conftest import Proxy, running, until
from tests.support.parrot import STOP_ID, ParrotEngine, Say


def ids(text: str) -> list[int]:
    return [*(ord(letter) for letter in text), STOP_ID]


async def test_a_turn_is_recorded_exactly_as_sampled(proxy: Proxy) -> None:
    answer = (await proxy.chat("t", "hi", model="any", temperature=0.7)).json()
    [turn] = await proxy.turns("t")
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert bytes_to_ids(turn.completion_ids).tolist() == ids("hello")
    assert bytes_to_floats(turn.sampling_logprobs).tolist() == [-0.25] * 6
    assert bytes_to_ids(turn.new_prompt_ids).tolist() == [1, *map(ord, "user:hi")]
    assert (turn.model, turn.served_model, turn.asked, turn.law["temperature"]) == (
        "any",
        "parrot",
        {"temperature": 0.7},
        0.7,
    )
    assert (turn.finish_reason, turn.partial, turn.delivered) == ("stop", False, 6)
    assert turn.reply == {"role": "assistant", "content": "hello"}
    assert answer["id"] == f"chatcmpl-{turn.turn_id}"


async def test_the_next_turn_begins_with_the_recorded_ids(proxy: Proxy) -> None:
    """I2."""
    first = (await proxy.chat("t", "hi")).json()["choices"][0]["message"]
    await proxy.chat("t", "hi", first, "more")
    one, two = await proxy.turns("t")
    assert proxy.engine.requests[1].prefix_ids == one.new_prompt_ids + one.completion_ids
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    assert bytes_to_ids(two.new_prompt_ids).tolist() == [1, *map(ord, "user:more")]
    assert two.messages == [{"role": "user", "content": "more"}]
    [sample] = (await proxy.http.get("/sessions/t/samples")).json()["items"]
    assert sample["turn_ids"] == [one.turn_id, two.turn_id]


async def test_tool_call_ids_are_ours_outside_and_the_models_own_inside() -> None:
    def script(request: Any) -> Say:
        return Say("done") if request.prefix_ids else Say(calls=[("own-1", "f", '{"a": 1}'), ("own-2", "f", "{}")])

    async with running(ParrotEngine(script)) as proxy:
        tools = [{"type": "function", "function": {"name": "f"}}]
        message = (await proxy.chat("t", "go", tools=tools)).json()["choices"][0]["message"]
        seen = [call["id"] for call in message["tool_calls"]]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "ok"} for call_id in seen]
        await proxy.chat("t", "go", message, *results, tools=tools)
        one, two = await proxy.turns("t")
        assert seen == [f"call_{one.turn_id}_0", f"call_{one.turn_id}_1"]
        assert one.call_ids == {seen[0]: "own-1", seen[1]: "own-2"}
        assert two.parent_id == one.turn_id
        rendered = proxy.engine.requests[1].job.messages
        assert [call["id"] for call in rendered[1]["tool_calls"]] == ["own-1", "own-2"]
        assert [message["tool_call_id"] for message in rendered[2:]] == ["own-1", "own-2"]


async def test_the_first_chunk_leaves_when_the_first_token_arrives() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("ab", gates={1: gate}))) as proxy:
        stream = await proxy.openai("t").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.role == "assistant"
        assert (await anext(chunks)).choices[0].delta.content == "a"
        gate.set()
        assert [chunk.choices[0].finish_reason async for chunk in chunks] == [None, "stop"]


async def test_a_client_that_leaves_cancels_the_generation_and_its_partial_turn_is_kept() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"b"' in line:
                    break
        await until(lambda: proxy.engine.cancelled)
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.finish_reason, turn.delivered) == (True, "cancelled", 2)
        assert bytes_to_ids(turn.completion_ids).tolist() == [97, 98]
        assert turn.error is not None and turn.error.startswith("client_left")


async def test_a_client_that_leaves_an_unstreamed_request_cancels_it_too() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        with pytest.raises(httpx.ReadTimeout):
            await proxy.http.post(
                "/t/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=0.3
            )
        await until(lambda: proxy.engine.cancelled)


async def test_completing_a_session_cancels_its_turns_keeps_them_and_refuses_later_calls() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("abc", gates={2: gate}))) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if '"b"' in line:
                    break
            done = await proxy.http.post("/sessions/t/complete", json={"reward": 0.5})
            assert done.status_code == 200 and done.json()["counts"]["turns"] == 1
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.completion_tokens) == (True, "cancelled", 2)
        refused = await proxy.chat("t", "more")
        assert refused.status_code == 410 and refused.json()["error"]["code"] == "session_closed"
        assert (await proxy.http.post("/sessions/t/complete", json={"reward": 0.5})).status_code == 200
        assert (await proxy.http.post("/sessions/t/complete", json={"reward": 0.6})).status_code == 409


async def test_errors_before_the_first_byte_have_status_and_retry_after() -> None:
    async with running(worker=False) as proxy:
        response = await proxy.chat("t", "x")
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "no_worker"
        assert await proxy.turns("t") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_template_refuses_is_a_400_that_names_the_field(stream: bool) -> None:
    refusal = BadRequest("no such role here", field="messages.0.role")
    async with running(ParrotEngine(lambda request: Say(refuse=refusal))) as proxy:
        response = await proxy.chat("t", "x", stream=stream)
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages.0.role"
        assert await proxy.turns("t") == []


async def test_a_context_overflow_has_its_own_code() -> None:
    overflow = ContextOverflow("too long", prompt_tokens=9, context_tokens=8)
    async with running(ParrotEngine(lambda request: Say(refuse=overflow))) as proxy:
        response = await proxy.chat("t", "x")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_engine_that_dies_before_the_first_token_is_a_503() -> None:
    async with running(ParrotEngine(lambda request: Say("abc", fail_after=0))) as proxy:
        response = await proxy.chat("t", "x", stream=True)
        assert response.status_code == 503 and "retry-after" in response.headers


async def test_an_engine_that_dies_after_the_first_byte_breaks_the_connection() -> None:
    async with running(ParrotEngine(lambda request: Say("abc", fail_after=2))) as proxy:
        seen = b""
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
                async for data in response.aiter_bytes():
                    seen += data
        assert b'"b"' in seen and b"error" not in seen and b"[DONE]" not in seen
        [turn] = await proxy.turns("t")
        assert (turn.partial, turn.finish_reason, turn.completion_tokens) == (True, "error", 2)
        assert turn.error is not None and turn.error.startswith("engine_failed")


@pytest.mark.parametrize("say", [Say("abc", lie=1), Say("abc", no_logprobs=True)])
async def test_tokens_that_do_not_add_up_are_an_error_and_never_padded(say: Say) -> None:
    """I1."""
    async with running(ParrotEngine(lambda request: say)) as proxy:
        response = await proxy.chat("t", "x")
        assert response.status_code in (502, 503)
        assert not [turn for turn in await proxy.turns("t") if not turn.partial]


class FailingStore(MemoryStore):
    """A store whose commits fail, as one whose server has gone does."""

    async def commit(self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, asked: Asked | None = None) -> int:
        raise StoreUnavailable("the store is gone")


async def test_a_turn_that_could_not_be_stored_is_an_error_that_the_agent_sees() -> None:
    """I3."""
    async with running(store=FailingStore()) as proxy:
        assert (await proxy.chat("t", "x")).status_code == 503
        seen = b""
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
                async for data in response.aiter_bytes():
                    seen += data
        assert b'"o"' in seen and b'"stop"' not in seen and b"[DONE]" not in seen


class SlowStore(MemoryStore):
    """A store whose commits wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.committing = asyncio.Event()
        self.go = asyncio.Event()

    async def commit(self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, asked: Asked | None = None) -> int:
        self.committing.set()
        await self.go.wait()
        return await super().commit(trial_id, turn, row, now=now, asked=asked)


async def test_the_finish_reason_waits_for_the_commit() -> None:
    """I3: all text may have left, nothing that ends the answer has."""
    store = SlowStore()
    async with running(store=store) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            seen = []
            async for line in lines:
                seen.append(line)
                if '"o"' in line:
                    break
            await store.committing.wait()
            assert await proxy.turns("t") == [] and 'finish_reason":"stop' not in "".join(seen)
            store.go.set()
            rest = [line async for line in lines if line]
        assert json.loads(rest[0][6:])["choices"][0]["finish_reason"] == "stop" and rest[-1] == "data: [DONE]"


async def test_a_client_that_leaves_during_the_commit_does_not_undo_it() -> None:
    store = SlowStore()
    async with running(store=store) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"o"' in line:
                    break
            await store.committing.wait()
        await asyncio.sleep(0.05)
        store.go.set()
        [turn] = await proxy.turns("t", 1)
        assert (turn.partial, turn.finish_reason) == (False, "stop")


async def test_n_choices_are_sibling_turns_with_seeds_of_their_own() -> None:
    engine = ParrotEngine(lambda request: Say(f"s{(request.job.sampling.seed or 0)}"))
    async with running(engine) as proxy:
        answer = (await proxy.chat("t", "x", n=3, seed=5)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["s5", "s6", "s7"]
        turns = await proxy.turns("t")
        assert len(turns) == 3 and [turn.fork_reason for turn in turns].count("sibling") == 2
        stream = await proxy.openai("t").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True, n=2, seed=1
        )
        texts, ends = ["", ""], ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert (texts, ends) == (["s1", "s2"], ["stop", "stop"])


async def test_silences_are_filled_with_comments_also_before_the_first_token() -> None:
    gates = {0: asyncio.Event(), 1: asyncio.Event()}
    async with running(ParrotEngine(lambda request: Say("ab", gates=gates)), keepalive_s=0.05) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
            raw, comments = b"", 0
            async for data in response.aiter_raw():
                raw += data
                if raw.count(b": keepalive\n") == 2 and not gates[0].is_set():
                    assert b"data" not in raw
                    gates[0].set()
                if raw.count(b": keepalive\n") == 4:
                    gates[1].set()
            comments = raw.count(b": keepalive\n")
        assert comments >= 4 and raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("refused", ["render_refused", "render_differs"])
async def test_a_worker_that_can_not_continue_makes_a_root_and_says_why(refused: str) -> None:
    engine = ParrotEngine(lambda request: Say("ok", refused=refused if request.prefix_ids else ""))
    async with running(engine) as proxy:
        first = (await proxy.chat("t", "hi")).json()["choices"][0]["message"]
        await proxy.chat("t", "hi", first, "more")
        _, two = await proxy.turns("t")
        assert (two.parent_id, two.fork_reason) == (None, refused)
        assert [message["content"] for message in two.messages] == ["hi", "ok", "more"]
        assert len(two.new_prompt_ids) // 4 == two.prompt_tokens


async def test_a_generation_that_spans_an_update_records_both_versions() -> None:
    """I10."""
    engine = ParrotEngine(lambda request: Say("abcd", versions=lambda i: "base/0" if i < 2 else "base/1"))
    async with running(engine) as proxy:
        await proxy.chat("t", "x")
        [turn] = await proxy.turns("t")
        assert [(span.version, span.start, span.end) for span in turn.versions] == [("base/0", 0, 2), ("base/1", 2, 5)]


async def test_the_trials_policy_overrides_the_agent_and_the_record_shows_both(proxy: Proxy) -> None:
    await proxy.http.post("/sessions/t", json={"sampling": {"force": {"temperature": 1.0, "top_p": 1.0}}})
    await proxy.chat("t", "x", temperature=0.2, top_p=0.5)
    [turn] = await proxy.turns("t")
    assert turn.asked == {"temperature": 0.2, "top_p": 0.5}
    assert (turn.law["temperature"], turn.law["top_p"], turn.constrained) == (1.0, 1.0, [])
    assert turn.options["changed"]["temperature"] == {"asked": 0.2, "served": 1.0}


async def test_tokens_under_a_bent_law_are_marked(proxy: Proxy) -> None:
    await proxy.chat("t", "x", top_p=0.5)
    [turn] = await proxy.turns("t")
    assert turn.constrained == [(0, 6)]


async def test_a_spent_limit_is_a_403_and_ends_the_session(proxy: Proxy) -> None:
    await proxy.http.post("/sessions/t", json={"limits": {"max_turns": 1}})
    assert (await proxy.chat("t", "x")).status_code == 200
    refused = await proxy.chat("t", "y")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "budget_spent")
    session = (await proxy.http.get("/sessions/t")).json()
    assert (session["status"], session["end_reason"]) == ("completed", "limit:max_turns")
    assert (await proxy.chat("t", "z")).status_code == 410
    rewarded = await proxy.http.post("/sessions/t/complete", json={"reward": 1.0})
    assert rewarded.status_code == 200 and rewarded.json()["reward"] == 1.0


async def test_a_token_limit_clamps_the_last_turn(proxy: Proxy) -> None:
    await proxy.http.post("/sessions/t", json={"limits": {"max_tokens": 8}})
    await proxy.chat("t", "x")
    answer = (await proxy.chat("t", "y")).json()
    assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["finish_reason"] == "length"


async def test_prompts_of_ids_continue_what_they_begin_with(proxy: Proxy) -> None:
    first = [5, 6, 7]
    await proxy.http.post("/t/v1/completions", json={"prompt": first})
    [one] = await proxy.turns("t")
    longer = first + bytes_to_ids(one.completion_ids).tolist() + [8]
    await proxy.http.post("/t/v1/completions", json={"prompt": longer})
    await proxy.http.post("/t/v1/completions", json={"prompt": [9]})
    _, two, three = await proxy.turns("t")
    assert (two.parent_id, bytes_to_ids(two.new_prompt_ids).tolist()) == (one.turn_id, [8])
    assert (three.parent_id, three.fork_reason) == (None, "new_conversation")


async def test_synthetic_sessions_are_marked() -> None:
    async with running(ParrotEngine(lambda request: Say("a", no_logprobs=True), synthetic=True)) as proxy:
        assert (await proxy.chat("t", "x")).status_code == 200
        assert (await proxy.http.get("/sessions/t")).json()["marks"] == ["synthetic"]


async def test_concurrent_turns_of_one_trial_are_each_recorded_once(proxy: Proxy) -> None:
    answers = await asyncio.gather(*(proxy.chat("t", f"agent {i}") for i in range(20)))
    turns = await proxy.turns("t")
    assert {answer.json()["id"][9:] for answer in answers} == {turn.turn_id for turn in turns}
    assert [turn.fork_reason for turn in turns] == [None, *["new_conversation"] * 19]


async def test_a_proxy_told_to_stop_lets_streams_finish_and_takes_no_more(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.engine.script = lambda request: Say("ab", gates={1: gate})
    running_chat = asyncio.create_task(proxy.chat("t", "x"))
    await until(lambda: proxy.engine.requests)
    draining = asyncio.create_task(proxy.app.state.turns.drain(5))
    await asyncio.sleep(0.02)
    assert (await proxy.chat("t", "y")).status_code == 503
    gate.set()
    assert (await running_chat).status_code == 200
    await draining


async def test_a_proxy_told_to_stop_keeps_what_does_not_finish_in_time(proxy: Proxy) -> None:
    proxy.engine.script = lambda request: Say("ab", gates={1: asyncio.Event()})
    running_chat = asyncio.create_task(proxy.chat("t", "x"))
    await until(lambda: proxy.engine.requests)
    await proxy.app.state.turns.drain(0.05)
    assert (await running_chat).status_code == 503
    [turn] = await proxy.turns("t")
    assert turn.partial and turn.completion_tokens == 1


class CountingStore(MemoryStore):
    """A store that notes which of its calls were made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def path(self, trial_id: str, numbers: Sequence[int]) -> Path:
        self.calls.append("path")
        return await super().path(trial_id, numbers)

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None:
        self.calls.append("mark_delivered")
        await super().mark_delivered(trial_id, turn_id, delivered)


async def test_a_turn_that_goes_on_here_reads_the_index_and_commits_and_nothing_else() -> None:
    store = CountingStore()
    async with running(store=store) as proxy:
        history: list[Any] = ["hi"]
        for i in range(3):
            history += [(await proxy.chat("t", *history)).json()["choices"][0]["message"], f"more {i}"]
        assert store.calls == []
        [sample] = (await proxy.http.get("/sessions/t/samples")).json()["items"]
        assert len(sample["turn_ids"]) == 3
        assert [turn.delivered for turn in await proxy.turns("t")] == [6, 6, 6]


async def test_an_answer_in_one_piece_whose_client_left_was_not_delivered() -> None:
    store = SlowStore()
    async with running(store=store) as proxy:
        with pytest.raises(httpx.ReadTimeout):
            await proxy.http.post(
                "/t/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=0.3
            )
        store.go.set()
        async with asyncio.timeout(10):
            while [turn.delivered for turn in await proxy.turns("t", 1)] != [0]:
                await asyncio.sleep(0.005)
