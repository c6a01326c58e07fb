"""One turn that goes well, seen from both ends: what the agent gets, and what is on record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from steno.contracts.records import bytes_to_floats, bytes_to_ids
from steno_proxy.store.interface import TokenPath
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import STOP_ID, ParrotEngine, Say, drawn


def ids(text: str) -> list[int]:
    return [*(ord(letter) for letter in text), STOP_ID]


async def test_a_turn_is_recorded_exactly_as_sampled(proxy: Proxy) -> None:
    answer = (await proxy.chat("t", "hi", model="any", temperature=0.7)).json()
    [turn] = await proxy.turns("t")
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert bytes_to_ids(turn.completion_ids).tolist() == ids("hello")
    assert bytes_to_floats(turn.sampling_logprobs).tolist() == drawn("t", turn.prompt_tokens, 6)
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
                if raw.count(b": keepalive\n") >= 2 and not gates[0].is_set():
                    assert b"data" not in raw
                    gates[0].set()
                if raw.count(b": keepalive\n") >= 4:
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


@pytest.mark.parametrize("refused", ["", "render_differs: other ids"])
@pytest.mark.parametrize("prompts", [("ab", "abhello more"), ([5, 6], [5, 6, *ids("hello"), STOP_ID, 7])])
async def test_the_retry_of_a_prompt_that_begins_with_another_ones_path_gets_its_answer(
    prompts: tuple[Any, Any], refused: str
) -> None:
    """Also where a worker that can not continue has made a root of it."""
    async with running(ParrotEngine(lambda r: Say("hello", refused=refused if r.prefix_ids else ""))) as proxy:
        for prompt in prompts:
            body = {"prompt": prompt}
            answer = await proxy.http.post("/t/v1/completions", json=body)
            again = await proxy.http.post("/t/v1/completions", json=body, headers={"x-stainless-retry-count": "1"})
            assert again.json() == answer.json()
        one, two = await proxy.turns("t")
        assert two.parent_id == (None if refused else one.turn_id)


async def test_synthetic_sessions_are_marked() -> None:
    async with running(ParrotEngine(lambda request: Say("a", no_logprobs=True), synthetic=True)) as proxy:
        assert (await proxy.chat("t", "x")).status_code == 200
        assert (await proxy.http.get("/sessions/t")).json()["marks"] == ["synthetic"]


async def test_concurrent_turns_of_one_trial_are_each_recorded_once(proxy: Proxy) -> None:
    answers = await asyncio.gather(*(proxy.chat("t", f"agent {i}") for i in range(20)))
    turns = await proxy.turns("t")
    assert {answer.json()["id"][9:] for answer in answers} == {turn.turn_id for turn in turns}
    assert [turn.fork_reason for turn in turns] == [None, *["new_conversation"] * 19]


class CountingStore(MemoryStore):
    """A store that notes which of its calls were made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def path(self, trial_id: str, numbers: Sequence[int]) -> TokenPath:
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
