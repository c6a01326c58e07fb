"""Trials that begin with a recorded turn: told again from the record, token for token, and sampled from there on; in each format,
by what was asked and not by when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from steno.contracts.errors import EngineFailed
from steno.contracts.records import ForkOf
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.sessions.told_agents import (
    AGENTS,
    CHAT_TOOL,
    Agent,
    Answers,
    Voice,
    by_chat,
    by_messages,
    fork,
    path,
    record,
    sampled,
)
from tests.support.machine.redis_server import RedisServer
from tests.support.records.losing import LosingStore
from tests.support.waiting import until
from tests.support.workers.parrot import Say


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(Voice()) as found:
        yield found


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
    with pytest.raises(openai.APIStatusError, match="not the one on record"):
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


class Refusing(Voice):
    """Takes no request while `refuses`."""

    refuses = False

    def say(self, request: Any) -> Say:
        return Say(refuse=EngineFailed("not now")) if self.refuses else super().say(request)


async def test_a_retry_of_what_was_refused_is_sampled_after_the_same_prompt_too() -> None:
    engine = Refusing()
    async with running(engine) as proxy:
        _, origin = await record(proxy, by_chat)
        trial = await fork(proxy, origin[0], resample=True)
        engine.refuses = True
        with pytest.raises(openai.APIStatusError):
            await by_chat(proxy, trial, "2027-11-12")
        assert not await proxy.store.turns(trial)
        engine.refuses = False
        await by_chat(proxy, trial, "2027-11-12")
        turns = [turn async for turn in proxy.steno.turns(trial)]
        prompt = path(turns, turns[0])[: 4 * turns[0].prompt_tokens]
        assert prompt == path(origin, origin[0])[: 4 * origin[0].prompt_tokens], "dates and all"


@pytest.mark.parametrize("resample", [False, True])
async def test_a_fork_whose_turns_the_store_has_lost_is_not_given_up(resample: bool) -> None:
    store = LosingStore()
    async with running(Voice(), store=store) as proxy:
        main = (await proxy.chat("origin", "main")).json()["choices"][0]["message"]["content"]
        more = [{"role": "assistant", "content": main}, "go on"]
        assert (await proxy.chat("origin", "main", *more)).status_code == 200
        await proxy.steno.complete("origin", Completion(reward=1.0))
        origin = [turn async for turn in proxy.steno.turns("origin")]
        trial = await fork(proxy, origin[0], resample=resample)
        store.mark(trial)
        for question in ("main", "something new"):
            assert (await proxy.chat(trial, question)).status_code == 200
        store.lose(trial)
        answer = await proxy.chat(trial, "something else")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert (await proxy.steno.session(trial)).status == "open"
