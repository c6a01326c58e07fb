"""Trials that begin with a recorded turn: told again from the record, token for token, and sampled from there on; in each format,
by what was asked and not by when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from steno.contracts.errors import Conflict, Forbidden, Gone, NotFound, StenoError
from steno.contracts.leases import LeaseRequest
from steno.contracts.records import ForkOf, SamplingPolicy, Turn
from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from tests.integration.http.conftest import Proxy, running
from tests.support.parrot import ParrotEngine, Say
from tests.support.redis_server import RedisServer
from tests.support.waiting import until

Answers = list[Any]
Agent = Callable[[Proxy, str, str], Awaitable[Answers]]
"""An agent of one format: (proxy, trial, date) -> what it was told. It asks three times, and calls a tool in between."""
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "read", "description": "reads", "parameters": PARAMETERS}}


class Voice(ParrotEngine):
    """Says something else each time, so that what is sampled again is another text. taken: how often it was asked."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.taken = 0

    def say(self, request: Any) -> Say:
        self.taken += 1
        messages = request.job.messages
        last = str(messages[-1]["content"]) if messages else ""
        if "look" in last and request.job.tools:
            paths = "ab" if "both" in last else "a"
            calls = [(f"own{self.taken}{path}", "read", f'{{"path": "{path}"}}') for path in paths]
            return Say(f"I look {self.taken}.", reasoning="hm", calls=calls)
        if "cut" in last:
            return Say("half of it", fail_after=4)
        return Say(f"said {self.taken}")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(Voice()) as found:
        yield found


def sampled(proxy: Proxy) -> int:
    return proxy.engine.taken  # type: ignore[attr-defined, no-any-return]


async def by_chat(proxy: Proxy, trial: str, date: str, *, stream: bool = False) -> Answers:
    client = proxy.openai(trial)
    messages: Answers = [{"role": "system", "content": f"Today is {date}."}, {"role": "user", "content": "look"}]
    told: Answers = []
    for question in ("", "and then", "and last"):
        if question:
            messages.append({"role": "user", "content": question})
        if stream:
            message = await _streamed(client, messages)
        else:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
            message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        told.append(message)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "text"})
    return told


async def _streamed(client: openai.AsyncOpenAI, messages: Answers) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    chunks: Any = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL], stream=True)
    async for chunk in chunks:
        delta = chunk.choices[0].delta if chunk.choices else None
        message["content"] += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            calls = message.setdefault("tool_calls", [])
            if call.index == len(calls):
                calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                calls[call.index]["function"][name] += getattr(call.function, name) or ""
    return message


async def by_chat_streamed(proxy: Proxy, trial: str, date: str) -> Answers:
    return await by_chat(proxy, trial, date, stream=True)


async def by_messages(proxy: Proxy, trial: str, date: str) -> Answers:
    client = anthropic.AsyncAnthropic(base_url=f"{proxy.url}/{trial}", api_key="none", max_retries=0, timeout=20)
    tools: Any = [{"name": "read", "description": "reads", "input_schema": PARAMETERS}]
    messages: Answers = [{"role": "user", "content": "look"}]
    told: Answers = []
    for question in ("", "and then", "and last"):
        if question:
            messages[-1]["content"] = (
                [*messages[-1]["content"], {"type": "text", "text": question}]
                if (messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], list))
                else messages[-1]["content"]
            )
            if messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": question})
        async with client.messages.stream(
            model="m", max_tokens=100, system=f"Today is {date}.", messages=messages, tools=tools
        ) as stream:
            answer = await stream.get_final_message()
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        told.append([block for block in blocks if block["type"] != "thinking"])
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "text"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return told


async def by_responses(proxy: Proxy, trial: str, date: str) -> Answers:
    """With `previous_response_id`: what was said before is on record here alone."""
    client = proxy.openai(trial)
    tools: Any = [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]
    sent: Any = "look"
    told: Answers = []
    before: dict[str, Any] = {}
    for question in ("and then", "and last", ""):
        answer = await client.responses.create(
            model="m", instructions=f"Today is {date}.", input=sent, tools=tools, **before
        )
        items = [item.model_dump() for item in answer.output if item.type != "reasoning"]
        told.append([(item["type"], item.get("call_id"), item.get("content")) for item in items])
        before = {"previous_response_id": answer.id}
        sent = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "text"}
            for item in items
            if item["type"] == "function_call"
        ]
        sent.append({"role": "user", "content": question})
    return told


async def by_gemini(proxy: Proxy, trial: str, date: str) -> Answers:
    contents: Answers = [{"role": "user", "parts": [{"text": "look"}]}]
    told: Answers = []
    declared = [{"functionDeclarations": [{"name": "read", "description": "reads", "parameters": {"type": "OBJECT"}}]}]
    for question in ("and then", "and last", ""):
        body = {
            "systemInstruction": {"parts": [{"text": f"Today is {date}."}]}, "contents": contents, "tools": declared,
        }  # fmt: skip
        answer = await proxy.http.post(f"/{trial}/v1beta/models/m:generateContent", json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()["candidates"][0]["content"]
        told.append([part for part in content["parts"] if not part.get("thought")])
        contents.append(content)
        results = [
            {"functionResponse": {"name": "read", "response": {"result": "text"}}}
            for part in content["parts"]
            if "functionCall" in part
        ]
        contents.append({"role": "user", "parts": [*results, {"text": question}]})
    return told


async def by_completions(proxy: Proxy, trial: str, date: str) -> Answers:
    """Text prompts that go on from the text so far, which is tokenised whole: nothing may differ."""
    text, told = "Today. ", []
    for question in ("look", " and then", " and last"):
        text += question
        answer = await proxy.openai(trial).completions.create(model="m", prompt=text)
        told.append(answer.choices[0].text)
        text += answer.choices[0].text
    return told


async def by_ids(proxy: Proxy, trial: str, date: str) -> Answers:
    """Prompts of ids, which have no dates; each goes on from the ids so far."""
    ids, told = [5, 6, 7], []
    for number in range(3):
        ids.append(10 + number)
        body = {"prompt": ids, "return_token_ids": True}
        answer = await proxy.http.post(f"/{trial}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["prompt_token_ids"] == ids
        told.append(choice["token_ids"])
        ids = ids + choice["token_ids"]
    return told


AGENTS: list[Agent] = [
    by_chat, by_chat_streamed, by_messages, by_responses, by_gemini, by_completions, by_ids,
]  # fmt: skip


async def record(proxy: Proxy, agent: Agent, trial: str = "origin") -> tuple[Answers, list[Turn]]:
    told = await agent(proxy, trial, "2026-01-02")
    await proxy.steno.complete(trial, Completion(reward=1.0))
    return told, [turn async for turn in proxy.steno.turns(trial)]


async def fork(proxy: Proxy, turn: Turn | str, trial: str = "fork", **fields: Any) -> str:
    turn_id = turn if isinstance(turn, str) else turn.turn_id
    spec = SessionSpec(fork_of=ForkOf(**{"trial_id": "origin", "turn_id": turn_id} | fields))
    await proxy.steno.register(trial, spec)
    return trial


def path(turns: list[Turn], last: Turn) -> bytes:
    """Ids of a conversation up to the end of a turn."""
    by_id, pieces, turn = {turn.turn_id: turn for turn in turns}, list[bytes](), last
    while True:
        pieces += (turn.completion_ids, turn.new_prompt_ids)
        if turn.parent_id is None:
            return b"".join(reversed(pieces))
        turn = by_id[turn.parent_id]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_what_was_asked_is_told_again_and_the_rest_is_sampled_after_the_same_ids(
    proxy: Proxy, agent: Agent
) -> None:
    told, origin = await record(proxy, agent)
    assert len(origin) == 3 and sampled(proxy) == 3
    again = await agent(proxy, await fork(proxy, origin[1]), "2027-11-12")
    turns = [turn async for turn in proxy.steno.turns("fork")]
    assert sampled(proxy) == 4, "two were told, one was sampled"
    assert again[:2] == told[:2] and again[2] != told[2]
    assert [turn.turn_id for turn in turns[:2]] == [turn.turn_id for turn in origin[:2]]
    for mine, theirs in zip(turns[:2], origin[:2], strict=True):
        assert path(turns, mine) == path(origin, theirs), "the same ids"
        assert mine.replayed == theirs.completion_tokens and not mine.completion_ids and mine.versions == []
    assert turns[2].parent_id == origin[1].turn_id and turns[2].fork_reason is None and turns[2].replayed is None
    assert path(turns, turns[2]).startswith(path(origin, origin[1]))
    assert turns[2].new_prompt_ids == origin[2].new_prompt_ids, "and it was asked the same after them"
    session = await proxy.steno.complete("fork", Completion(reward=0.0))
    assert session.fork_of is not None and session.fork_of.trial_id == "origin"
    assert session.counts.completion_tokens == turns[2].completion_tokens
    [sample] = await proxy.steno.samples("fork")
    assert sum(sample.loss_mask) == turns[2].completion_tokens and sample.token_ids == path(turns, turns[2])


async def test_each_token_is_counted_and_trained_once(proxy: Proxy) -> None:
    spec = GroupSpec(group_id="o", run_id="r", size=1)
    await proxy.steno.create_group(spec)
    await by_chat(proxy, "o.0", "2026-01-02")
    await proxy.steno.complete("o.0", Completion(reward=1.0))
    origin = [turn async for turn in proxy.steno.turns("o.0")]
    before = (await proxy.steno.run("r")).sampled["base/0"]
    assert before == sum(turn.completion_tokens for turn in origin)
    forks = ForkOf(trial_id="o.0", turn_id=origin[1].turn_id)
    group = await proxy.steno.create_group(GroupSpec(group_id="f", run_id="r", size=3, fork_of=forks))
    assert group.group.fork_of == forks
    again = await proxy.steno.create_group(GroupSpec(group_id="f", run_id="r", size=3, fork_of=forks))
    assert [trial.session.trial_id for trial in again.trials] == ["f.0", "f.1", "f.2"]
    for number, trial in enumerate(group.trials):
        await by_chat(proxy, trial.session.trial_id, "2026-01-03")
        await proxy.steno.complete(trial.session.trial_id, Completion(reward=float(number)))
    new = sum([turn.completion_tokens async for turn in proxy.steno.turns("f.0")]) * 3
    assert (await proxy.steno.run("r")).sampled == {"base/0": before + new}
    leases = await proxy.steno.lease(LeaseRequest(run_id="r", consumer="t", max_groups=9))
    tokens = {trial: sum(counts.values()) for lease in leases for trial, counts in lease.tokens.items()}
    assert tokens == {"o.0": before, "f.0": new // 3, "f.1": new // 3, "f.2": new // 3}
    for trial, count in tokens.items():
        assert sum(sum(sample.loss_mask) for sample in await proxy.steno.samples(trial)) == count


async def test_a_turn_is_sampled_anew_after_the_same_prompt(proxy: Proxy) -> None:
    told, origin = await record(proxy, by_chat)
    for place in (0, 1):
        trial = await fork(proxy, origin[place], f"anew-{place}", resample=True)
        again = await by_chat(proxy, trial, "2027-11-12")
        turns = [turn async for turn in proxy.steno.turns(trial)]
        assert [turn.replayed is not None for turn in turns] == [number < place for number in range(3)]
        assert again[:place] == told[:place] and again[place] != told[place]
        prompt = path(turns, turns[place])[: 4 * turns[place].prompt_tokens]
        assert prompt == path(origin, origin[place])[: 4 * origin[place].prompt_tokens], "dates and all"


async def test_branches_are_found_by_what_they_ask_in_whatever_order(proxy: Proxy) -> None:
    """A sub-agent and a title ran while the main one waited; they ask in another order now."""

    async def ask(trial: str, *said: Any) -> str:
        answer = await proxy.chat(trial, *said)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    main = await ask("origin", "main")
    title, helper = await ask("origin", "title of it"), await ask("origin", "help")
    assistant = {"role": "assistant", "content": helper}
    helped = await ask("origin", "help", assistant, "more help")
    twice = [await ask("origin", "the same question") for _ in range(2)]
    await ask("origin", "main", {"role": "assistant", "content": main}, "go on")
    await proxy.steno.complete("origin", Completion(reward=1.0))
    turns = [turn async for turn in proxy.steno.turns("origin")]
    before = sampled(proxy)
    await fork(proxy, turns[-1])
    assert await asyncio.gather(ask("fork", "help"), ask("fork", "main"), ask("fork", "title of it")) == [
        helper, main, title,
    ]  # fmt: skip
    assert await asyncio.gather(*(ask("fork", "the same question") for _ in range(2))) in (twice, twice[::-1])
    assert await ask("fork", "help", assistant, "more help") == helped
    await ask("fork", "main", {"role": "assistant", "content": main}, "go on")
    assert sampled(proxy) == before, "all of it was on record"
    await ask("fork", "something new")
    assert sampled(proxy) == before + 1
    mine = {turn.turn_id: turn async for turn in proxy.steno.turns("fork")}
    assert len(mine) == len(turns) + 1 and all(
        path(list(mine.values()), mine[t.turn_id]) == path(turns, t) for t in turns
    )


async def look_at_both(proxy: Proxy, trial: str, order: str, texts: str = "ab") -> tuple[str, str]:
    """Two calls of one turn. order: in which their results are given. texts: what each of them gave. Returns: the answers after
    them."""
    client = proxy.openai(trial)
    messages: Answers = [{"role": "user", "content": "look at both"}]
    answer = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
    message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    ids = dict(zip("ab", (call["id"] for call in message["tool_calls"]), strict=True))
    given = dict(zip("ab", texts, strict=True))
    messages += [message, *({"role": "tool", "tool_call_id": ids[path], "content": given[path]} for path in order)]
    told = []
    for question in ("", "and then"):
        if question:
            messages.append({"role": "user", "content": question})
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
        told.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": told[-1]})
    return told[0], told[1]


async def test_results_of_a_turns_calls_may_come_in_another_order(proxy: Proxy) -> None:
    """Agents that run calls at the same time give their results as they come."""
    told = await look_at_both(proxy, "origin", "ab")
    await proxy.steno.complete("origin", Completion(reward=1.0))
    origin = [turn async for turn in proxy.steno.turns("origin")]
    again = await look_at_both(proxy, await fork(proxy, origin[1]), "ba")
    turns = [turn async for turn in proxy.steno.turns("fork")]
    assert again[0] == told[0] and again[1] != told[1]
    assert [turn.replayed is not None for turn in turns] == [True, True, False]
    assert path(turns, turns[1]) == path(origin, origin[1])
    await look_at_both(proxy, await fork(proxy, origin[1], "anew", resample=True), "ba")
    turns = [turn async for turn in proxy.steno.turns("anew")]
    prompt = path(turns, turns[1])[: 4 * turns[1].prompt_tokens]
    assert prompt == path(origin, origin[1])[: 4 * origin[1].prompt_tokens] and turns[1].replayed is None
    with pytest.raises(openai.APIStatusError, match="was not asked"):
        await look_at_both(proxy, await fork(proxy, origin[1], "swapped"), "ab", texts="ba")


async def test_several_choices_are_told_together(proxy: Proxy) -> None:
    client = proxy.openai("origin")
    first = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], n=3)
    await proxy.steno.complete("origin", Completion(reward=1.0))
    turns = [turn async for turn in proxy.steno.turns("origin")]
    await fork(proxy, turns[-1])
    again = await proxy.openai("fork").chat.completions.create(
        model="other", messages=[{"role": "user", "content": "a"}], n=3, temperature=0.3
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in first.choices]
    assert again.usage == first.usage and sampled(proxy) == 3


async def test_a_marked_retry_is_told_what_was_told(proxy: Proxy) -> None:
    told, origin = await record(proxy, by_chat)
    await fork(proxy, origin[-1])
    body = {"messages": [{"role": "system", "content": "Today is 2026-05-05."}, {"role": "user", "content": "look"}]}
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        answer = await proxy.http.post("/fork/v1/chat/completions", json=body | {"tools": [CHAT_TOOL]}, headers=headers)
        message, usage = answer.json()["choices"][0]["message"], answer.json()["usage"]
        assert message["tool_calls"] == told[0]["tool_calls"] and message["content"] == told[0]["content"]
        assert usage["completion_tokens"] == origin[0].completion_tokens
        assert usage["prompt_tokens"] == origin[0].prompt_tokens
    assert (await proxy.steno.session("fork")).counts.turns == 1


async def test_asked_more_often_than_recorded_it_is_told_the_last_answer_again_until_the_fork(proxy: Proxy) -> None:
    """As who did not get the first answer asks, without saying so."""
    _, origin = await record(proxy, by_chat)
    await fork(proxy, origin[1])
    start: Answers = [{"role": "system", "content": "Today is 2026-01-02."}, "look"]
    answers = [(await proxy.chat("fork", *start, tools=[CHAT_TOOL])).json()["choices"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2] and sampled(proxy) == 3
    assert (await proxy.steno.session("fork")).counts.turns == 1
    await by_chat(proxy, "fork", "2026-01-02")
    before = sampled(proxy)
    assert (await proxy.chat("fork", *start, tools=[CHAT_TOOL])).status_code == 200
    assert sampled(proxy) == before + 1, "after the fork it is a question like any other"


async def test_a_fork_of_a_fork_is_told_both(proxy: Proxy) -> None:
    _, origin = await record(proxy, by_chat)
    again = await by_chat(proxy, await fork(proxy, origin[0]), "2026-01-03")
    await proxy.steno.complete("fork", Completion(reward=1.0))
    turns = [turn async for turn in proxy.steno.turns("fork")]
    await fork(proxy, turns[-1], "second", trial_id="fork")
    before = sampled(proxy)
    assert await by_chat(proxy, "second", "2026-01-04") == again and sampled(proxy) == before
    third = [turn async for turn in proxy.steno.turns("second")]
    assert [path(third, turn) for turn in third] == [path(turns, turn) for turn in turns]


async def test_another_format_is_told_by_its_own_ids(proxy: Proxy) -> None:
    _, origin = await record(proxy, by_chat)
    await fork(proxy, origin[-1])
    told = await by_messages(proxy, "fork", "2026-01-05")
    [call] = [block for block in told[0] if block["type"] == "tool_use"]
    assert call["id"] == f"toolu_{origin[0].turn_id}_0" and call["input"] == {"path": "a"}


DIFFERENT = [
    ({}, "Today is 2026-01-02.", None),
    ({}, "Today is Monday, January 5, 2026.", None),
    ({}, "Today is tomorrow.", "tomorrow"),
    ({"may_differ": []}, "Today is 2026-01-03.", "2026-01-03"),
    ({"may_differ": ["numbers"]}, "Today is 2026-01-03.", None),
]


@pytest.mark.parametrize(("how", "system", "differs"), DIFFERENT)
async def test_a_difference_that_no_rule_names_ends_the_trial(
    proxy: Proxy, how: dict[str, Any], system: str, differs: str | None
) -> None:
    _, origin = await record(proxy, by_chat)
    await fork(proxy, origin[-1], **how)
    before = sampled(proxy)
    system_message = {"role": "system", "content": system}
    answer = await proxy.chat("fork", system_message, "look", tools=[CHAT_TOOL])
    assert sampled(proxy) == before
    if differs is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 410 and answer.json()["error"]["code"] == "replay_diverged"
    assert "2026-01-02" not in answer.text, "of the other trial its agent learns nothing"
    session = await proxy.steno.session("fork")
    assert (session.status, session.end_reason) == ("aborted", "replay_diverged")
    [turn] = [turn async for turn in proxy.steno.turns("fork")]
    assert turn.partial and not turn.completion_tokens and turn.messages[0]["content"] == system
    assert turn.error is not None and "Today is 2026-01-02." in turn.error.replace("<dates>", "2026-01-02")
    assert system in turn.error and f"turn {origin[0].turn_id} of the origin" in turn.error
    assert await proxy.steno.samples("fork") == []
    assert (await proxy.chat("fork", system_message, "look")).status_code == 410
    with pytest.raises(Conflict):
        await proxy.steno.complete("fork", Completion(reward=1.0))


@pytest.mark.parametrize("what", ["tools", "question", "more", "choices"])
async def test_what_differs_is_said(proxy: Proxy, what: str) -> None:
    _, origin = await record(proxy, by_chat)
    await fork(proxy, origin[-1])
    question = "look" if what != "question" else "x" * 5000 + "look"
    said: Answers = [{"role": "system", "content": "Today is 2026-01-02."}, question]
    said += ["and more"] if what == "more" else []
    tool = (
        CHAT_TOOL if what != "tools" else {"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}
    )
    answer = await proxy.chat("fork", *said, tools=[tool], n=2 if what == "choices" else 1)
    assert answer.status_code == 410
    [turn] = [turn async for turn in proxy.steno.turns("fork")]
    words = {
        "tools": "the tools differ", "question": "new message 1 differs", "more": "new message 2 differs",
        "choices": "number of choices",
    }  # fmt: skip
    assert turn.error is not None and words[what] in turn.error and len(turn.error) < 2500


async def test_a_conversation_may_not_leave_the_record_in_its_middle(proxy: Proxy) -> None:
    told, origin = await record(proxy, by_chat)
    await fork(proxy, origin[-1])
    start: Answers = [{"role": "system", "content": "Today is 2026-01-02."}, "look"]
    assert (await proxy.chat("fork", *start, tools=[CHAT_TOOL])).status_code == 200
    result = {"role": "tool", "tool_call_id": told[0]["tool_calls"][0]["id"], "content": "another text"}
    before = sampled(proxy)
    answer = await proxy.chat("fork", *start, told[0], result, "and then", tools=[CHAT_TOOL])
    assert answer.status_code == 410 and sampled(proxy) == before
    turn = [turn async for turn in proxy.steno.turns("fork")][-1]
    assert turn.parent_id == origin[0].turn_id and "recorded: 'tool: text'; asked: 'tool: another text'" in (
        turn.error or ""
    )


async def test_what_was_cut_off_is_not_told_and_can_not_be_forked(proxy: Proxy) -> None:
    await proxy.chat("origin", "cut")
    await proxy.chat("origin", "whole")
    await proxy.steno.complete("origin", Completion(reward=1.0))
    cut, whole = [turn async for turn in proxy.steno.turns("origin")]
    assert cut.partial
    with pytest.raises(Conflict, match=f"turn {cut.turn_id} of trial origin was cut off"):
        await fork(proxy, cut)
    await fork(proxy, whole)
    assert (await proxy.chat("fork", "whole")).status_code == 200
    await fork(proxy, whole, "other")
    assert (await proxy.chat("other", "cut")).status_code == 410


@pytest.mark.parametrize("case", ["trial", "turn", "open", "deleted", "again", "rule", "text_only"])
async def test_a_fork_that_can_not_be_is_refused_by_name(proxy: Proxy, case: str) -> None:
    _, origin = await record(proxy, by_chat)
    await proxy.chat("open", "hello")
    [running_turn] = [turn async for turn in proxy.steno.turns("open")]
    expected: tuple[type[StenoError], str] = {
        "trial": (NotFound, "nobody"), "turn": (NotFound, "trial origin has no turn 'ffffffffffff'"),
        "open": (Conflict, "trial open is still open"), "deleted": (Gone, "session origin is closed"),
        "again": (Conflict, "fork_of: session fork is registered already, with another fork_of"),
        "rule": (StenoError, "may_differ"), "text_only": (Conflict, "is text_only"),
    }[case]  # fmt: skip
    fields: dict[str, Any] = {"trial": {"trial_id": "nobody"}, "open": {"trial_id": "open"}}.get(case, {})
    turn_id = {"turn": "ffffffffffff", "open": running_turn.turn_id}.get(case, origin[0].turn_id)
    if case == "deleted":
        await proxy.steno.delete("origin")
    if case == "again":
        await fork(proxy, origin[1])
    if case == "text_only":
        await proxy.store.add_marks("origin", ["text_only"])
    with pytest.raises(expected[0], match=expected[1]):
        if case == "rule":
            body = {"fork_of": {"trial_id": "origin", "turn_id": turn_id, "may_differ": ["everything"]}}
            answer = await proxy.http.post("/sessions/fork", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["field"].startswith("fork_of.may_differ")
            raise StenoError("may_differ")
        await fork(proxy, turn_id, **fields)


async def test_a_fork_has_its_origins_sampling_unless_it_is_given(proxy: Proxy) -> None:
    law = SamplingPolicy(force={"temperature": 0.5})
    await proxy.steno.register("origin", SessionSpec(sampling=law))
    _, origin = await record(proxy, by_chat)
    await fork(proxy, origin[0])
    assert (await proxy.steno.session("fork")).sampling == law
    spec = SessionSpec(fork_of=ForkOf(trial_id="origin", turn_id=origin[0].turn_id), sampling=SamplingPolicy())
    await proxy.steno.register("other", spec)
    assert (await proxy.steno.session("other")).sampling == SamplingPolicy()


async def test_a_runs_key_forks_trials_of_its_run_and_no_others() -> None:
    async with running(Voice(), admin_key="the-admins-key") as proxy:
        for run in ("mine", "theirs"):
            await proxy.steno.create_group(GroupSpec(group_id=run, run_id=run, size=1))
            assert (await proxy.chat(f"{run}.0", "hello")).status_code == 200
            await proxy.steno.complete(f"{run}.0", Completion(reward=1.0))
        key = await proxy.steno.run_key("mine")
        turns = {run: (await proxy.steno.turn_page(f"{run}.0")).items[0].turn_id for run in ("mine", "theirs")}

        async def group(run: str) -> httpx.Response:
            spec = {"run_id": "mine", "size": 1, "fork_of": {"trial_id": f"{run}.0", "turn_id": turns[run]}}
            return await proxy.http.post("/groups", json=spec, headers={"authorization": f"Bearer {key}"})

        assert (await group("mine")).status_code == 200
        assert (await group("theirs")).status_code == Forbidden.status


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


async def test_any_replica_tells_the_next_turn(server: RedisServer) -> None:
    """Each request goes to the other replica; two that ask the same at once are told the same."""
    async with running(Voice(), redis_url=server.url) as one, running(Voice(), redis_url=server.url) as two:
        told, origin = await record(one, by_chat)
        await fork(one, origin[1])
        messages: Answers = [{"role": "system", "content": "Today is 2030-01-01."}, "look"]
        for number, proxy in enumerate((two, one)):
            answer = await proxy.chat("fork", *messages, tools=[CHAT_TOOL])
            message = answer.json()["choices"][0]["message"]
            assert message["content"] == told[number]["content"]
            messages.append(told[number])
            for call in told[number].get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "text"})
            messages.append(("and then", "and last")[number])
        assert (sampled(one), sampled(two)) == (3, 0)
        assert (await two.chat("fork", *messages, tools=[CHAT_TOOL])).status_code == 200
        assert (sampled(one), sampled(two)) == (3, 1)
        turns = [turn async for turn in one.steno.turns("fork")]
        assert turns[2].parent_id == origin[1].turn_id and path(turns, turns[1]) == path(origin, origin[1])
        await fork(one, origin[1], "both")
        start: Answers = [{"role": "system", "content": "Today is 2030-01-01."}, "look"]
        answers = await asyncio.gather(*(p.chat("both", *start, tools=[CHAT_TOOL]) for p in (one, two)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        known = Counter([turn.turn_id async for turn in one.steno.turns("both") if turn.replayed is not None])
        assert known == {origin[0].turn_id: 1}, "and it is on record once"


async def test_a_trial_in_the_archive_is_told_again(server: RedisServer, tmp_path: Path) -> None:
    with server.client() as client:
        client.flushall()
    kept: dict[str, Any] = {"redis_url": server.url, "archive": str(tmp_path / "archive")}
    async with running(Voice(), retention_s=0.01, sweep_s=0.02, **kept) as proxy:
        told, origin = await record(proxy, by_chat)
        with server.client() as client:
            await until(lambda: not client.exists("steno:{origin}:session"))
        again = await by_chat(proxy, await fork(proxy, origin[1]), "2027-11-12")
        turns = [turn async for turn in proxy.steno.turns("fork")]
        assert again[:2] == told[:2] and again[2] != told[2]
        assert path(turns, turns[2]).startswith(path(origin, origin[1])) and turns[2].fork_reason is None
