"""Forks that can't be, and trials that ask something else than what is on record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from steno.contracts.errors import Conflict, Forbidden, Gone, NotFound, StenoError
from steno.contracts.records import ForkOf, SamplingPolicy
from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from tests.integration.http.conftest import Proxy, running
from tests.integration.http.sessions.told_agents import (
    CHAT_TOOL,
    PARAMETERS,
    Answers,
    Voice,
    by_chat,
    fork,
    record,
    sampled,
)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(Voice()) as found:
        yield found


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
        turns |= {"nobodys": turns["theirs"], "open": turns["theirs"]}
        await proxy.steno.create_group(GroupSpec(group_id="open", run_id="theirs", size=1))
        for other in ("theirs", "nobodys", "open"):  # and it learns nothing of them
            assert (await group(other)).status_code == Forbidden.status, other
        turns["theirs"] = "0" * 12
        assert (await group("theirs")).status_code == Forbidden.status
