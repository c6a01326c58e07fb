"""A trial is a tree: what agents really do to their histories, each a branch with its reason, and every sampled token in exactly
one sample's mask (I2, I4). The shapes are those of the agents named; the chat format carries them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say

Message = dict[str, Any]
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
MAIN, TITLE, SUB = "You are an agent.", "You write titles.", "You look things up."
CALL = '{"command": "ls", "timeout": 1.0}'


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def say(request: Any) -> Say:
    """A tool call after a task or a result; words where there are no tools, or where words are asked for."""
    last = str(request.job.messages[-1]["content"])
    if not request.job.tools or last.startswith("say"):
        return Say(last.removeprefix("say ") + "!")
    return Say("I look.", reasoning="hm", calls=[("own", "bash", CALL)])


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(say)) as found:
        yield found


async def ask(proxy: Proxy, messages: list[Message], tools: Any = BASH, **fields: Any) -> Message:
    answer = await proxy.chat("t", *messages, **({"tools": tools} if tools is not None else {}), **fields)
    assert answer.status_code == 200, answer.text
    message: Message = answer.json()["choices"][0]["message"]
    return message


def results(reply: Message, text: str = "a.txt") -> list[Message]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in reply["tool_calls"]]


async def step(proxy: Proxy, messages: list[Message], text: str = "a.txt", **how: Any) -> list[Message]:
    """One turn with a tool call, echoed as it came; returns the history with its result."""
    reply = await ask(proxy, messages, **how)
    return [*messages, reply, *results(reply, text)]


async def reasons(proxy: Proxy) -> list[str | None]:
    return [turn.fork_reason and str(turn.fork_reason) for turn in await proxy.turns("t")]


async def balanced(proxy: Proxy) -> list[dict[str, Any]]:
    """The samples, after checking that every sampled token is trained in exactly one of them."""
    turns = await proxy.turns("t")
    samples: list[dict[str, Any]] = (await proxy.http.get("/sessions/t/samples")).json()["items"]
    assert sum(sum(sample["loss_mask"]) for sample in samples) == sum(turn.completion_tokens for turn in turns)
    assert {turn_id for sample in samples for turn_id in sample["turn_ids"]} == {turn.turn_id for turn in turns}
    return samples


async def test_a_title_first_and_then_the_work_are_two_straight_conversations(proxy: Proxy) -> None:
    """OpenCode."""
    await ask(proxy, [system(TITLE), user("Write a title:"), user("fix it")], tools=None, max_tokens=32_000)
    history = [system(MAIN), user("fix it")]
    for i in range(10):
        history = await step(proxy, history, f"result {i}")
        # Null content comes back as "", arguments compactly, reasoning under its own name.
        echo = history[-2]
        echo["content"] = echo["content"] or ""
        echo["tool_calls"][0]["function"]["arguments"] = '{"command":"ls","timeout":1}'
    assert await reasons(proxy) == [None, "new_conversation", *[None] * 9]
    assert sorted(len(sample["turn_ids"]) for sample in await balanced(proxy)) == [1, 10]


async def test_sub_agents_at_the_same_time_grow_branches_of_their_own(proxy: Proxy) -> None:
    """Claude Code."""

    async def work(prompt: str, task: str, turns: int) -> None:
        history = [system(prompt), user(task)]
        for i in range(turns):
            history = await step(proxy, history, f"{task} {i}")

    main = await step(proxy, [system(MAIN), user("do three things")])
    await asyncio.gather(*(work(SUB, f"thing {i}", 4) for i in range(3)), step(proxy, main, "meanwhile"))
    turns = await proxy.turns("t")
    roots = [turn for turn in turns if turn.parent_id is None]
    assert len(roots) == 4 and {str(turn.fork_reason) for turn in roots[1:]} == {"new_conversation"}
    assert not any(turn.fork_reason for turn in turns if turn.parent_id is not None)
    assert sorted(len(sample["turn_ids"]) for sample in await balanced(proxy)) == [2, 4, 4, 4]


@pytest.mark.parametrize(("tools", "reason"), [([], "tools_changed"), (BASH, None)])
async def test_a_compaction_is_a_summary_at_the_end_and_a_conversation_of_its_own(
    proxy: Proxy, tools: list[Any], reason: str | None
) -> None:
    """Claude Code sends `tools: []` with the summary prompt, others leave the tools as they were."""
    history = [system(MAIN), user("work")]
    for _ in range(3):
        history = await step(proxy, history)
    summary = await ask(proxy, [*history, user("say all that happened")], tools=tools)
    fresh = [system(MAIN), user(f"This goes on from before: {summary['content']}")]
    fresh = await step(proxy, fresh)
    await step(proxy, fresh)
    assert await reasons(proxy) == [None, None, None, reason, "new_conversation", None]
    samples = await balanced(proxy)
    assert len(samples) == (3 if reason else 2)


async def test_a_rewritten_history_shares_its_beginning_and_trains_it_once(proxy: Proxy) -> None:
    history = [system(MAIN), user("work")]
    for i in range(3):
        history = await step(proxy, history, f"long result {i}")
    first = await proxy.turns("t")
    shortened = [{**m, "content": "(cut)"} if m.get("content") == "long result 1" else m for m in history]
    await step(proxy, shortened)
    turns = await proxy.turns("t")
    assert (turns[3].parent_id, str(turns[3].fork_reason)) == (first[1].turn_id, "history_rewritten")
    one, two = await balanced(proxy)
    assert one["turn_ids"][:2] == two["turn_ids"][:2]
    assert [completion["shared"] for completion in two["completions"]] == [True, True, False]


async def test_a_reply_that_an_agent_could_not_use_is_dropped_and_stays_a_sample(proxy: Proxy) -> None:
    """mini-swe-agent: two user messages in a row."""
    history = [system(MAIN), user("work")]
    history = await step(proxy, history)
    await ask(proxy, history)
    await step(proxy, [*history, user("Use the tool as I said.")])
    assert await reasons(proxy) == [None, None, "diverged"]
    assert len(await balanced(proxy)) == 2


@pytest.mark.parametrize(("calls", "first"), [(True, "assistant_rewritten"), (False, None)])
async def test_a_reply_that_is_asked_again_and_then_forgotten_is_a_fork(calls: bool, first: str | None) -> None:
    """SWE-agent: the requery has the reply's text without its calls, and a complaint; the history then has neither."""

    def stumbling(request: Any) -> Say:
        if len(request.job.messages) == 2:
            return Say("I try.", calls=[("own", "bash", "{no json")] if calls else [])
        return Say("I look.", calls=[("own", "bash", CALL)])

    async with running(ParrotEngine(stumbling)) as proxy:
        history = [system(MAIN), user("work")]
        bad = await ask(proxy, history)
        requery = [*history, {"role": "assistant", "content": bad["content"]}, user("Exactly one call, please.")]
        good = await ask(proxy, requery)
        await step(proxy, [*history, good, *results(good)])
        assert await reasons(proxy) == [None, first, "history_dropped"]
        await balanced(proxy)


async def test_dropped_turns_in_the_middle_say_so(proxy: Proxy) -> None:
    history = [system(MAIN), user("work")]
    for i in range(3):
        history = await step(proxy, history, f"result {i}")
    await step(proxy, [*history[:2], *history[4:]])
    assert (await reasons(proxy))[-1] == "history_dropped"
    assert len(await balanced(proxy)) == 2


async def test_asked_again_with_a_larger_limit_is_a_sibling_and_the_longer_one_goes_on(proxy: Proxy) -> None:
    history = [system(MAIN), user("say something long")]
    short = await ask(proxy, history, max_tokens=4)
    whole = await ask(proxy, history, max_tokens=64)
    assert (short["content"], whole["content"]) == ("some", "something long!")
    await step(proxy, [*history, whole, user("go on")])
    turns = await proxy.turns("t")
    assert [turn.finish_reason for turn in turns] == ["length", "stop", "tool_calls"]
    assert (str(turns[1].fork_reason), turns[2].parent_id) == ("sibling", turns[1].turn_id)
    assert not any(turn.superseded_by for turn in turns) and len(await balanced(proxy)) == 2


def rewritten(reply: Message, name: str, arguments: str) -> Message:
    calls = [{**call, "function": {"name": name, "arguments": arguments}} for call in reply["tool_calls"]]
    return {**reply, "tool_calls": calls}


async def test_a_reply_that_came_back_as_something_else_says_so(proxy: Proxy) -> None:
    """Same tool, other arguments: a client that empties them wants a shorter prompt."""
    history = await step(proxy, [system(MAIN), user("work")])
    await step(proxy, [*history[:2], rewritten(history[2], "bash", "{}"), *history[3:]])
    assert await reasons(proxy) == [None, "assistant_rewritten"]
    assert len(await balanced(proxy)) == 2


async def test_a_call_rewritten_to_another_tool_under_our_id_is_still_that_call(proxy: Proxy) -> None:
    """OpenCode writes a call that it can't run as one of a tool `invalid`, in every request from then on."""
    messages, written = [system(MAIN), user("work")], []
    for number in range(6):
        reply = await ask(proxy, messages)
        written.append(rewritten(reply, "invalid", f'{{"tool": "bash", "error": "no such {number}"}}'))
        messages = [*messages, written[-1] if number % 2 else reply, *results(reply)]
    await ask(proxy, messages)
    assert await reasons(proxy) == [None] * 7
    [sample] = await balanced(proxy)
    assert len(sample["turn_ids"]) == 7
    turns = await proxy.store.turns("t")
    how = [turn.options.get("echoed_as") for turn in turns]
    assert how == [None, None, "call_ids", None, "call_ids", None, "call_ids"]
    seen = proxy.engine.requests[-1].job.messages
    assert [call["function"]["name"] for m in seen for call in m.get("tool_calls", ())] == ["bash"] * 6


async def test_a_call_whose_arguments_are_no_json_may_come_back_as_any(proxy: Proxy) -> None:
    proxy.engine.script = lambda request: Say("I look.", calls=[("own", "bash", '{"command": "l')])
    first = await ask(proxy, [system(MAIN), user("work")])
    for arguments in ("{}", '{"command": "l"}'):
        await ask(proxy, [system(MAIN), user("work"), rewritten(first, "bash", arguments), *results(first, arguments)])
    assert await reasons(proxy) == [None, None, "diverged"]


async def test_ids_of_another_trial_say_nothing(proxy: Proxy) -> None:
    """I8: an agent that learns of another trial's ids gets no tokens of it."""
    start = [system(MAIN), user("work")]
    reply = (await proxy.chat("other", *start, tools=BASH)).json()["choices"][0]["message"]
    own = await ask(proxy, start)
    forged = rewritten(reply, "invalid", "{}")
    await ask(proxy, [*start, forged, *results(forged)])
    _, second = await proxy.store.turns("t")
    assert second.parent_id is None and second.fork_reason == "assistant_rewritten"
    assert own["tool_calls"][0]["id"] not in str(second.messages)


# -- what a client kept of a turn that was cut off


async def cut(proxy: Proxy, messages: list[Message], letter: str) -> None:
    """A streaming client that is gone when it has read this letter."""
    proxy.engine.script = lambda request: Say("abcd", gates={3: asyncio.Event()})
    body = {"messages": messages, "stream": True}
    before = len(proxy.engine.cancelled)
    async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if f'"{letter}"' in line:
                break
    await until(lambda: len(proxy.engine.cancelled) > before)
    await proxy.turns("t", 1)
    proxy.engine.script = lambda request: Say("yes")


@pytest.mark.parametrize("kept", ["abc", "ab", "a"])
async def test_a_turn_that_was_cut_is_gone_on_from_whatever_its_client_kept_of_it(proxy: Proxy, kept: str) -> None:
    """What was sent and what was read differ by what was on its way."""
    history = [system(MAIN), user("work")]
    await cut(proxy, history, "c")
    history += [{"role": "assistant", "content": kept}, user("You were cut off. Go on.")]
    for i in range(2):
        history += [await ask(proxy, history, tools=None), user(f"more {i}")]
    one, two, three = await proxy.turns("t")
    assert (one.partial, one.delivered, one.reply["content"]) == (True, 3, "abc")
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    assert (three.parent_id, three.fork_reason) == (two.turn_id, None)
    [sample] = await balanced(proxy)
    assert sample["turn_ids"] == [one.turn_id, two.turn_id, three.turn_id]


async def test_other_words_than_those_of_the_cut_turn_are_a_rewrite(proxy: Proxy) -> None:
    history = [system(MAIN), user("work")]
    await cut(proxy, history, "c")
    await ask(proxy, [*history, {"role": "assistant", "content": "xyz"}, user("Go on.")], tools=None)
    assert await reasons(proxy) == [None, "assistant_rewritten"]


async def test_a_closed_block_is_kept_by_its_client_and_recognised() -> None:
    """Claude Code goes on from closed blocks though the end never came."""
    gates = [{4: asyncio.Event()}, {}]
    engine = ParrotEngine(lambda request: Say("abcd", reasoning="hm", gates=gates.pop(0)))
    async with running(engine) as proxy:
        question = {"role": "user", "content": "x"}
        body: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [question], "stream": True}
        body["thinking"] = {"type": "adaptive"}
        seen = []
        async with proxy.http.stream("POST", "/t/v1/messages", json=body) as response:
            async for line in response.aiter_lines():
                seen.append(line)
                if '"b"' in line:
                    break
        await until(lambda: engine.cancelled)
        [turn] = await proxy.turns("t", 1)
        async with asyncio.timeout(60):
            while turn.finish_reason == "open":
                await asyncio.sleep(0.005)
                [turn] = await proxy.turns("t")
        assert (turn.finish_reason, turn.delivered, turn.reply["content"]) == ("cancelled", 4, "")
        assert any('"content_block_stop"' in line for line in seen)
        kept = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
        follow = {**body, "stream": False, "messages": [question, kept, {"role": "user", "content": "go on"}]}
        answer: httpx.Response = await proxy.http.post("/t/v1/messages", json=follow)
        assert answer.status_code == 200
        one, two = await proxy.turns("t")
        assert (two.parent_id, two.fork_reason) == (one.turn_id, None)


async def test_calls_that_come_back_without_the_text_beside_them_go_on_from_their_turn(proxy: Proxy) -> None:
    """As CrewAI writes a history: its calls are there, `content` is null, whatever was said."""
    history = [system(MAIN), user("fix it")]
    for _ in range(3):
        *history, reply, result = await step(proxy, history)
        history += [reply | {"content": None}, result]
    turns = await proxy.turns("t", 3)
    assert [turn.fork_reason for turn in turns] == [None] * 3
    assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert [turn.options.get("echoed_as") for turn in turns] == [None, "calls", "calls"]
