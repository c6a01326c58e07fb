"""A request whose last item asks for a summary of the conversation, as Codex's own provider sends it."""

from __future__ import annotations

import json
from typing import cast

import pytest
from openai.types.responses import Response

from steno.contracts.errors import EngineFailed
from steno_proxy.dialects.base import Piece
from steno_proxy.dialects.responses.compaction import ASK
from steno_proxy.dialects.responses.dialect import ResponsesCompact, ResponsesCount
from steno_proxy.turns.answer_log import LogReader
from steno_proxy.turns.interfaces import TurnClient
from tests.unit.proxy.dialects.responses.test_responses import TURN, USER, F, call, output, parse, refused
from tests.unit.proxy.dialects.responses.test_responses_events import EVENT, HEADER, RESPONSES, choice, events, stream

TRIGGER = {"type": "compaction_trigger"}
TOOLS = {"type": "additional_tools", "tools": [F]}
SUMMARY = choice({"role": "assistant", "content": "We did it.", "reasoning_content": "hm"})


def test_a_request_that_ends_with_the_trigger_is_that_of_compact() -> None:
    items = [TOOLS, USER, call(), output()]
    asked = parse([*items, TRIGGER], tools=[F], store=True, text={"format": {"type": "json_object"}}, stream=True)
    assert asked.job.messages[-1] == {"role": "user", "content": ASK} and asked.job.messages[0] == USER
    assert (asked.job.tools, asked.job.response_format.type, asked.stream) == ([], "text", True)
    assert asked.compacts and not asked.kept and not asked.dropped
    compact = ResponsesCompact().parse(json.dumps({"model": "m", "input": items}).encode())
    assert compact.job == asked.job and not compact.stream
    after = parse([TRIGGER], previous_response_id=f"resp_{TURN}")
    assert (after.after, len(after.job.messages)) == (TURN, 1)


def test_a_trigger_asks_for_nothing_in_another_place_or_alone() -> None:
    asked = parse([USER, TRIGGER, USER])
    assert not asked.compacts and asked.dropped == ["compaction_trigger"]
    assert refused([TRIGGER]).field == "input"
    body = json.dumps({"input": [USER, TRIGGER]}).encode()
    assert ResponsesCount().parse_count(body).job.messages == [USER]


def test_the_answer_is_one_sealed_item_which_is_the_conversation_when_it_comes_back() -> None:
    whole = json.loads(RESPONSES.answer(parse([USER, TRIGGER]), HEADER, [SUMMARY]))
    Response.model_validate(whole)
    [item] = whole["output"]
    assert (item["type"], whole["status"], whole["usage"]["output_tokens"]) == ("compaction", "completed", 5)
    [message] = parse([item]).job.messages
    assert message["role"] == "user" and message["content"].endswith("We did it.")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_streamed_nothing_leaves_before_the_summary_is_whole(reason: str) -> None:
    done = choice(SUMMARY.message, reason)
    found, closed = stream(parse([USER, TRIGGER], stream=True), [Piece(reasoning="hm"), Piece("We did it.")], done)
    for event in found:
        EVENT.validate_python(event)
    assert [event["type"] for event in found] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert closed == [False, False] and found[-1]["response"]["output"] == [found[3]["item"]]
    assert found[3]["item"]["type"] == "compaction" and "We did it." not in json.dumps(found)


def test_a_summary_that_says_nothing_is_a_failure() -> None:
    asked, nothing = parse([USER, TRIGGER], stream=True), choice({"role": "assistant", "content": " \n"})
    with pytest.raises(EngineFailed):
        RESPONSES.answer(asked, HEADER, [nothing])
    reader = LogReader(RESPONSES, asked, cast(TurnClient, None), HEADER)
    reader.piece(0, Piece(" \n"), nothing)
    reader.finish(nothing)
    with pytest.raises(EngineFailed) as caught:
        reader.end([nothing])
    assert not reader.written_choices()  # so that it is a plain error where nothing has left yet
    found = events(reader.broken(caught.value))  # all that leaves after a keepalive
    assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in found] == [0, 1, 2]
