"""`steno.client.client` against a real proxy with keys: the whole life of a group, sync and async, and what each key opens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from steno.client.client import AsyncClient, Client
from steno.contracts.errors import Conflict, Forbidden, Gone, NotFound, Unauthorized
from steno.contracts.records import bytes_to_ids
from steno.contracts.rest import Completion, GroupSpec, SessionSpec, Trial
from tests.integration.face.conftest import ADMIN
from tests.support.programs.stack import Stack


@pytest.fixture
def steno(locked: Stack) -> Iterator[Client]:
    with Client(locked.url, ADMIN) as client:
        yield client


@pytest.fixture
async def asteno(locked: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(locked.url, ADMIN) as client:
        yield client


def say(trial: Trial, *texts: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    with openai.OpenAI(base_url=trial.urls["openai"], api_key=trial.api_key) as agent:
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = agent.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return messages


def test_a_group_from_its_making_to_its_rewards(steno: Client, locked: Stack) -> None:
    made = steno.create_group(GroupSpec(group_id="pair", size=2, task={"name": "t"}))
    assert [trial.session.group_id for trial in made.trials] == ["pair", "pair"]
    assert steno.create_group(GroupSpec(group_id="pair", size=2, task={"name": "t"})).group == made.group
    with pytest.raises(Conflict):
        steno.create_group(GroupSpec(group_id="pair", size=3))
    first, second = made.trials
    say(first, "one", "two")
    turns = list(steno.turns(first.session.trial_id))
    assert [turn.parent_id for turn in turns] == [None, turns[0].turn_id]
    assert all(len(bytes_to_ids(turn.completion_ids)) == turn.completion_tokens > 0 for turn in turns)
    with Client(locked.url, made.harness_key) as harness:
        done = harness.complete(first.session.trial_id, Completion(reward=0.0, metrics={"steps": 2}))
        assert (done.status, done.reward, done.metrics) == ("completed", 0.0, {"steps": 2.0})
        assert harness.complete(first.session.trial_id, Completion(reward=0.0, metrics={"steps": 2})) == done
        with pytest.raises(Conflict):
            harness.complete(first.session.trial_id, Completion(reward=1.0))
        with pytest.raises(Forbidden):
            harness.delete(first.session.trial_id)
    (sample,) = steno.samples(first.session.trial_id)
    assert sample.reward == 0.0 and sample.turn_ids == [turn.turn_id for turn in turns]
    assert len(sample.token_ids) // 4 == len(sample.loss_mask)
    assert [found.trial_id for found in steno.sessions(group_id="pair", status="open")] == [second.session.trial_id]
    assert steno.group("pair").trial_ids == [first.session.trial_id, second.session.trial_id]


def test_events_come_as_they_happen_and_end_with_the_session(steno: Client) -> None:
    trial = steno.register("events-1")
    seen: list[str] = []
    watcher = threading.Thread(target=lambda: seen.extend(event["type"] for _, event in steno.events("events-1")))
    watcher.start()
    say(trial, "one")
    steno.complete("events-1", Completion(reward=1.0))
    watcher.join(30)
    assert not watcher.is_alive()
    assert seen == ["turn", "completed"]


async def test_the_asynchronous_client_reads_the_same(asteno: AsyncClient, steno: Client) -> None:
    trial = await asteno.register("async-1", SessionSpec(metadata={"a": None}))
    say(trial, "one")
    assert await asteno.session("async-1") == steno.session("async-1")
    assert (await asteno.session("async-1")).metadata == {"a": None}
    assert [turn async for turn in asteno.turns("async-1")] == list(steno.turns("async-1"))
    assert await asteno.samples("async-1") == steno.samples("async-1")
    await asteno.complete("async-1", Completion())
    assert [event["type"] async for _, event in asteno.events("async-1")] == ["turn", "completed"]


def test_paging_reaches_every_session_once(steno: Client) -> None:
    names = [f"page-{index}" for index in range(7)]
    for name in names:
        steno.register(name)
    found = [session.trial_id for session in steno.sessions(limit=2)]
    assert [name for name in found if name.startswith("page-")] == names
    assert len(set(found)) == len(found)


def test_a_deleted_session_is_gone_and_an_unknown_one_not_found(steno: Client) -> None:
    steno.register("deleted-1")
    steno.delete("deleted-1")
    with pytest.raises(Gone):
        steno.session("deleted-1")
    with pytest.raises(NotFound):
        steno.session("never-1")


def test_no_key_and_an_agents_key_open_nothing_of_the_control_plane(steno: Client, locked: Stack) -> None:
    trial = steno.register("keys-1")
    for key, kind in ((None, Unauthorized), (trial.api_key, Forbidden)):
        with Client(locked.url, key) as other:
            for call in (
                lambda: other.session("keys-1"),
                lambda: other.session_page(),
                lambda: other.complete("keys-1", Completion(reward=1.0)),
                lambda: other.workers(),
            ):
                with pytest.raises(kind):
                    call()
