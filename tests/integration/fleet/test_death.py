"""A worker is killed while it speaks, and no agent sees it (I9): exact words, calls, ids, whatever was cut in the middle."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.fleet.fleet import TOOLS, Answer, ask, kill_speaker, names, scripted, wait_for
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running

PROXY = ["--resume-grace-s", "0.3", "--queue-s", "300"]
_names = names("w")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("fleet")
    with running(folder / "logs", scripted(folder, next(_names)), proxy=PROXY) as stack:
        yield stack


@pytest.fixture
def two(fleet: Stack) -> Stack:
    """The stack with two workers, whoever has been killed before."""
    while len(fleet.workers) < 2:
        name = next(_names)
        fleet.start_worker(*scripted(fleet.folder.parent, name), name=name)
    wait_for(fleet, *(name_of(child) for child in fleet.workers))
    return fleet


def name_of(child: Any) -> str:
    words: list[str] = child.args
    return words[words.index("--worker-id") + 1]


CUTS: list[tuple[str, Callable[[Answer], bool]]] = [
    ("words", lambda answer: "word10" in answer.content),
    ("reason", lambda answer: "word10" in answer.reasoning),
    ("call", lambda answer: "word10" in answer.calls.get(1, {}).get("arguments", "")),
    ("stop", lambda answer: "word30" in answer.content),
]


@pytest.mark.parametrize(("text", "cut"), CUTS, ids=[text for text, _ in CUTS])
def test_the_stream_goes_on_from_the_last_token(two: Stack, text: str, cut: Callable[[Answer], bool]) -> None:
    fields = {"tools": TOOLS, "stop": ["HALT here"]}
    whole, broken = ask(two, f"{text}-whole", text, **fields), ask(two, f"{text}-cut", text, cut, **fields)
    assert (broken.content, broken.reasoning, broken.finish, broken.done) == (
        whole.content, whole.reasoning, whole.finish, True,
    )  # fmt: skip
    assert [call["arguments"] for call in broken.calls.values()] == [call["arguments"] for call in whole.calls.values()]
    [expected], [turn] = two.turns(f"{text}-whole"), two.turns(f"{text}-cut")
    same = ("completion_ids", "new_prompt_ids", "prompt_digest", "finish_reason", "stop", "law", "versions", "partial")
    assert {key: turn[key] for key in same} == {key: expected[key] for key in same}
    assert [call["id"] for call in turn["reply"].get("tool_calls", [])] == [
        call["id"] for call in broken.calls.values()
    ]
    assert turn["reply"]["content"] == broken.content
    assert turn["attempt"] == 1 and turn["delivered"] == len(turn["completion_ids"])
    first, second = turn["workers"]
    assert first["worker_id"] != second["worker_id"] == turn["worker_id"]
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], len(turn["completion_ids"]))


def kill_who_answers(stack: Stack, trial: str) -> None:
    until((stack.folder.parent / f"{trial}.told").exists)
    kill_speaker(stack)


def test_an_answer_in_one_piece_goes_on_too_and_its_conversation_after_it(two: Stack) -> None:
    said = [{"role": "user", "content": "words"}]
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(
            httpx.post(two.base_url("piece") + "/chat/completions", json={"messages": said}, timeout=120)
        )
    )
    thread.start()
    kill_who_answers(two, "piece")
    thread.join()
    assert found[0].status_code == 200, found[0].text
    said += [found[0].json()["choices"][0]["message"], {"role": "user", "content": "reason"}]
    again = httpx.post(two.base_url("piece") + "/chat/completions", json={"messages": said}, timeout=120)
    assert again.status_code == 200
    first, second = two.turns("piece")
    assert second["parent_id"] == first["turn_id"] and second["fork_reason"] is None


def test_what_cant_be_rebuilt_breaks_where_it_was_told_and_starts_again_where_not(two: Stack) -> None:
    penalty = {"frequency_penalty": 0.5}
    broken = ask(two, "told", "words", CUTS[0][1], **penalty)
    assert broken.broken and not broken.done
    [turn] = two.turns("told")
    assert turn["partial"] and turn["error"].startswith("worker_lost") and turn["attempt"] == 0
    wait_for(two, *(name_of(child) for child in two.workers))
    name = next(_names)
    two.start_worker(*scripted(two.folder.parent, name), name=name)
    wait_for(two, *(name_of(child) for child in two.workers))
    found: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": "words"}]} | penalty
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(two.base_url("untold") + "/chat/completions", json=body, timeout=120))
    )
    thread.start()
    kill_who_answers(two, "untold")
    thread.join()
    assert found[0].status_code == 200, found[0].text
    *lost, whole = two.turns("untold")
    assert not whole["partial"] and whole["attempt"] == 1
    for turn in lost:  # none, if it was killed before its first token
        assert turn["partial"] and turn["superseded_by"] == whole["turn_id"]


def test_a_worker_that_starts_again_is_another_one_and_a_lone_one_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path / "logs", scripted(tmp_path, "only"), proxy=PROXY) as stack:

        def kill_and_start(answer: Answer) -> bool:
            if "word10" not in answer.content:
                return False
            stack.start_worker(*scripted(tmp_path, "next"), name="next")
            return True

        answer = ask(stack, "t", "words", kill_and_start)
        assert answer.done and answer.content.endswith("word199")
        [turn] = stack.turns("t")
        assert [span["worker_id"] for span in turn["workers"]] == ["only", "next"]


def test_a_worker_told_to_stop_hands_over_what_it_has_not_finished(two: Stack) -> None:
    """drain_s over: its streams fail, and go on elsewhere without any grace."""
    for child in two.workers:
        assert child.poll() is None
    stopped: list[str] = []

    def stop(answer: Answer) -> bool:
        if "word10" in answer.content and not stopped:
            speaking = [one["id"] for one in two.get("/workers")["items"] if one["in_flight"]]
            child = next(one for one in two.workers if name_of(one) == speaking[0])
            child.terminate()
            stopped.append(speaking[0])
            two.workers.remove(child)
        return False

    answer = ask(two, "stopped", "words", stop)
    assert answer.done and answer.content.endswith("word199")
    [turn] = two.turns("stopped")
    assert turn["attempt"] == 1 and turn["workers"][0]["worker_id"] == stopped[0]


async def test_many_at_once_all_go_on_and_every_token_is_on_record_once(two: Stack) -> None:
    trials = [f"many-{number}" for number in range(24)]
    victim = two.workers[0]
    async with httpx.AsyncClient(timeout=300) as client:

        async def stream(trial: str) -> Answer:
            answer = Answer()
            body = {"messages": [{"role": "user", "content": "few"}], "stream": True}
            async with client.stream("POST", two.base_url(trial) + "/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if answer.take(line) and "word5" in answer.content and victim.poll() is None:
                        victim.kill()
            return answer

        answers = await asyncio.gather(*map(stream, trials))
    victim.wait()
    two.workers.remove(victim)
    assert {answer.content for answer in answers} == {answers[0].content} and answers[0].content.endswith("word59")
    assert all(answer.done for answer in answers)
    turns = [turn for trial in trials for turn in two.turns(trial)]
    assert len(turns) == len(trials) and not any(turn["partial"] for turn in turns)
    assert {tuple(turn["completion_ids"]) for turn in turns} == {tuple(turns[0]["completion_ids"])}
    assert 0 < sum(turn["attempt"] for turn in turns) < len(turns)


def test_blocks_that_were_closed_before_the_cut_stand_as_they_were_told(two: Stack) -> None:
    """Messages: the text is closed, and the turn on record as open, when its worker dies in the middle of the second call."""
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    body = {"model": "m", "max_tokens": 4096, "stream": True, "tools": tools}
    body["messages"] = [{"role": "user", "content": "call"}]
    events: list[dict[str, Any]] = []
    killed, written, pieces = False, "", 0
    with httpx.stream("POST", two.base_url("blocks") + "/messages", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                written += events[-1].get("delta", {}).get("partial_json", "")
                pieces += events[-1]["type"] == "content_block_delta" and events[-1]["index"] == 2
                if pieces > 10 and not killed:
                    killed = True
                    [turn] = two.turns("blocks")
                    assert turn["finish_reason"] == "open" and turn["partial"]
                    kill_speaker(two)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert killed and kinds[-1] == "message_stop" and kinds.count("content_block_stop") == 3
    [turn] = two.turns("blocks")
    assert (turn["attempt"], turn["finish_reason"], turn["partial"]) == (1, "tool_calls", False)
    calls = turn["reply"]["tool_calls"]
    assert written == "".join(call["function"]["arguments"] for call in calls)
    told = [
        event["content_block"]["id"] for event in events if event.get("content_block", {}).get("type") == "tool_use"
    ]
    assert told == [call["id"] for call in calls]
