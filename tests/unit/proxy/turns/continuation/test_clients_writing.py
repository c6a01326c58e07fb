"""Replies as clients write them back are gone on from, with the recorded ids. A reply that was changed is a fork."""

from __future__ import annotations

import json

import pytest

from steno.contracts.chat import Message
from steno.contracts.records import ForkReason
from steno_proxy.turns import continuation
from steno_proxy.turns.continuation import Plan
from tests.unit.proxy.sessions.agent import assistant, tool
from tests.unit.proxy.trial import HI, ON, Trial

IDS = [f"call_000000000000_{i}" for i in range(3)]
"""Of the first turn of a trial."""
READ = {"properties": {"path": {"type": "string"}, "limit": {"type": "number", "default": 100}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": READ}}]
GIVEN = [{"path": "a", "limit": "3"}, {"path": "b", "why": "to see"}, {"path": "c", "limit": None}]
PARSED = [{"path": "a", "limit": 3}, {"path": "b", "limit": 100}, {"path": "c"}]


def calls(arguments: list[dict[str, object]]) -> list[tuple[str, str, str]]:
    return [(call_id, "read", json.dumps(one)) for call_id, one in zip(IDS, arguments, strict=False)]


RESULTS = [tool(call_id, f"of {call_id}") for call_id in IDS]


def goose(arguments: list[dict[str, object]], text: str = "I look.") -> list[Message]:
    """Each call with its result behind it."""
    said = [assistant("" if i else text, call) for i, call in enumerate(calls(arguments))]
    return [message for pair in zip(said, RESULTS, strict=False) for message in pair]


async def looked(text: str = "I look.") -> Trial:
    trial = Trial()
    await trial.said(text, calls=assistant("", *calls(GIVEN))["tool_calls"], tools=TOOLS)
    return trial


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("text", ["I look.", "\nI look.\n"])
@pytest.mark.parametrize("said", [GIVEN, PARSED], ids=["as sampled", "as parsed"])
@pytest.mark.parametrize("text_apart", [False, True])
async def test_parallel_calls_each_with_its_result_go_on_from_their_turn(merges, text, said, text_apart) -> None:
    trial = await looked(text)
    history = [HI, *goose(said)] if not text_apart else [HI, assistant("I look."), *goose(said, "")]
    found = await trial.asked(*history, tools=TOOLS, merges=merges)
    assert (found.parent, found.fork_reason, found.prefix.messages) == (0, None, 2)
    assert found.echoed_as == "split"
    assert found.job.messages == [HI, assistant(text, *calls(GIVEN)), *RESULTS], "as it was sampled"
    assert found.new_messages == RESULTS
    second = await trial.said("Done.", *found.new_messages, after=0, tools=TOOLS)
    found = await trial.asked(*history, assistant("Done."), ON, tools=TOOLS, merges=merges, recorder=trial.replica())
    assert (found.parent, found.fork_reason, found.echoed_as) == (second, None, None)


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("first", ["", "\n\nHello."], ids=["at once", "after a reply without its space"])
async def test_what_an_older_version_recorded_of_such_calls_is_gone_on_from_by_both(
    merges: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It put nothing together: the first request after them was a root, and the next went on from that."""

    async def asked(older: bool) -> Plan:
        with monkeypatch.context() as version:
            if older:
                version.setattr(continuation, "gathered", lambda messages, *_: (messages, frozenset()))
            return await trial.asked(*history, tools=TOOLS, merges=merges, recorder=trial.replica())

    trial, before = Trial(), -1
    history = [HI]
    if first:
        before = await trial.said(first, tools=TOOLS)
        history += [assistant(first.strip()), ON]
    made = [(f"call_{before + 1:012x}_{i}", "read", json.dumps(one)) for i, one in enumerate(GIVEN)]
    reply = assistant("", *made)["tool_calls"]
    await trial.said("I look.", *(history if before < 0 else [ON]), calls=reply, after=before, tools=TOOLS)
    for i, call in enumerate(made):
        history += [assistant("" if i else "I look.", call), tool(call[0], "x")]
    found = await asked(older=True)
    assert (found.parent, found.fork_reason) == (before, ForkReason.ASSISTANT_REWRITTEN)
    for turn, older in enumerate([True, False, False, True, False], 1):
        last = await trial.said(f"Done {turn}.", *found.new_messages, after=found.parent, tools=TOOLS)
        history += [assistant(f"Done {turn}."), ON]
        found = await asked(older)
        assert (found.parent, found.fork_reason, found.echoed_as) == (last, None, None), turn


async def test_calls_that_come_apart_after_what_an_older_version_recorded_are_put_together() -> None:
    trial = await looked()
    before = [HI, *goose(GIVEN)]
    more = [(f"call_000000000001_{i}", "read", json.dumps(GIVEN[i])) for i in range(2)]
    second = await trial.said("And?", *before, calls=assistant("", *more)["tool_calls"], tools=TOOLS)
    results = [tool(call[0], "x") for call in more]
    history = [*before, assistant("And?", more[0]), results[0], assistant("", more[1]), results[1]]
    found = await trial.asked(*history, tools=TOOLS)
    assert (found.parent, found.fork_reason, found.echoed_as, found.new_messages) == (second, None, "split", results)


async def test_of_a_turn_that_was_cut_off_the_calls_that_its_client_kept_are_put_together() -> None:
    trial = Trial()
    await trial.said("I look.", calls=assistant("", *calls(GIVEN))["tool_calls"], tools=TOOLS, partial=True)
    found = await trial.asked(HI, *goose(GIVEN[:2]), ON, tools=TOOLS)
    assert (found.parent, found.fork_reason) == (0, None)
    assert found.new_messages == [*RESULTS[:2], ON], "no call stands twice"


async def test_of_parallel_calls_one_that_was_emptied_is_a_fork_that_goes_on() -> None:
    trial = await looked()
    history = [HI, *goose([GIVEN[0], {}, GIVEN[2]])]
    found = await trial.asked(*history, tools=TOOLS)
    assert (found.parent, found.fork_reason) == (-1, ForkReason.ASSISTANT_REWRITTEN)
    assert found.job.messages == history, "as its client sent it"
    second = await trial.said("Done.", *found.new_messages, tools=TOOLS)
    found = await trial.asked(*history, assistant("Done."), ON, tools=TOOLS, recorder=trial.replica())
    assert (found.parent, found.fork_reason) == (second, None)


async def test_arguments_as_the_requests_schema_parsed_them_go_on_from_their_turn() -> None:
    trial = await looked()
    found = await trial.asked(HI, assistant("I look.", *calls(PARSED)), *RESULTS, tools=TOOLS)
    assert (found.parent, found.fork_reason, found.echoed_as) == (0, None, "call_ids")
    assert found.job.messages[1] == assistant("I look.", *calls(GIVEN)), "as it was sampled"
    for other in ({"path": "b"}, {"path": "", "limit": 100}, {"limit": 100}, {}):
        said = assistant("I look.", *calls([PARSED[0], other, PARSED[2]]))
        found = await trial.asked(HI, said, *RESULTS, tools=TOOLS)
        same = other == {"path": "b"}
        assert found.fork_reason == (None if same else ForkReason.ASSISTANT_REWRITTEN)
    said = assistant("I look.", *calls(PARSED))
    found = await trial.asked(HI, said, *RESULTS, tools=[{"type": "function", "function": {"name": "read"}}])
    assert found.parent == -1, "under other tools nothing is gone on from"
    assert found.job.messages[1] == said


async def test_text_around_a_call_may_be_joined_with_line_ends() -> None:
    trial = await looked("I look.And then.")
    said = assistant("I look.\nAnd then.", *calls(GIVEN))
    found = await trial.asked(HI, said, *RESULTS, tools=TOOLS)
    assert (found.parent, found.fork_reason, found.echoed_as) == (0, None, "call_ids")
    assert found.job.messages[1]["content"] == "I look.And then."
    found = await trial.asked(HI, assistant("I look. And then.", *calls(GIVEN)), *RESULTS, tools=TOOLS)
    assert found.fork_reason == ForkReason.ASSISTANT_REWRITTEN


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("content", [[{"type": "text", "text": text} for text in ("Hm.", "Done.")], "Hm.\nDone."])
async def test_reasoning_as_a_text_before_the_text_goes_on_from_its_turn(merges, content) -> None:
    trial = Trial()
    await trial.said("\n\nDone.", reasoning="Hm.\n")
    said = {**assistant(), "content": content}
    found = await trial.asked(HI, said, ON, merges=merges)
    assert (found.parent, found.fork_reason, found.echoed_as) == (0, None, "reasoning")
    assert found.job.messages[1] == {**assistant("\n\nDone."), "reasoning_content": "Hm.\n"}, "as it was sampled"
    found = await trial.asked(HI, {**assistant(), "content": "Oh.\nDone."}, ON, merges=merges)
    assert (found.parent, found.fork_reason) == (-1, ForkReason.ASSISTANT_REWRITTEN)
