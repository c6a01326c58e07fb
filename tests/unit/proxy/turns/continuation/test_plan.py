"""Which recorded reply a message stands for, where several may be meant, and what it costs to find out."""

from __future__ import annotations

import asyncio

from steno.contracts.records import ForkReason
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.turns.continuation import MOST_CANDIDATES
from tests.unit.proxy.trial import HI, ON, TOOL, Trial, reply


async def test_exactly_the_same_goes_before_the_same_but_for_space() -> None:
    trial = Trial()
    exact = await trial.said("Done.")
    await trial.said("Done.\n")
    found = await trial.asked(HI, reply("Done."), ON)
    assert (found.parent, found.echoed_as, trial.store.reads) == (exact, None, 1)


async def test_of_several_the_newest_whole_one_is_meant() -> None:
    trial = Trial()
    await trial.said("\nDone.")
    whole = await trial.said("\n\nDone.")
    await trial.said("\n\nDone. And", partial=True)
    found = await trial.asked(HI, reply("Done."), ON)
    assert (found.parent, found.echoed_as, found.fork_reason) == (whole, "space", None)
    assert found.job.messages[1]["content"] == "\n\nDone.", "the worker is given what was sampled"


async def test_three_thousand_siblings_cost_no_more_than_sixteen() -> None:
    trial = Trial()
    for i in range(3000):
        await trial.said(f"\n{i}")
    assert (await trial.asked(HI, reply("other"), ON)).fork_reason == "assistant_rewritten"
    assert trial.store.reads == MOST_CANDIDATES == 16
    assert (await trial.asked(HI, reply("2990"), ON)).parent == 2990
    reads = trial.store.reads - 16
    assert reads == 1, "of the path that it goes on from: the replies are known by now"
    assert (await trial.asked(HI, reply("2"), ON)).fork_reason == "assistant_rewritten", "too far back"


async def test_a_long_conversation_costs_a_read_for_each_echo_once_at_each_replica() -> None:
    trial, history, parent, asked = Trial(), [HI], -1, HI
    for i in range(50):
        parent = await trial.said(f"\n{i}\n", asked, after=parent)
        history += [reply(str(i)), ON]
        asked = ON
    found = await trial.asked(*history)
    assert len((await trial.recorder.enter("t")).echoes) == 50
    assert (found.parent, found.fork_reason, trial.store.reads) == (parent, None, 51)
    assert (await trial.asked(*history)).parent == parent
    assert trial.store.reads == 52, "the path alone"
    other = trial.replica()
    assert (await trial.asked(*history, recorder=other)).parent == parent
    assert trial.store.reads == 52 + 51


async def test_an_echo_is_found_though_its_conversation_began_under_other_tools() -> None:
    trial = Trial()
    await trial.said("One.", tools=TOOL)
    second = await trial.said("\nTwo.", HI, reply("One."), ON)
    found = await trial.asked(HI, reply("One."), ON, reply("Two."), ON)
    assert (found.parent, found.fork_reason, found.echoed_as) == (second, None, "space")


async def test_a_reply_that_is_newer_than_its_row_here_is_compared_once() -> None:
    """Another replica has saved the open turn again, with more in it, since this one has read its row."""
    trial = Trial()
    await trial.said("I will look.", partial=True)
    recording = await trial.recorder.enter("t")
    recording.keep_reply(0, reply("I will look. Then write."))
    found = await asyncio.wait_for(trial.asked(HI, reply("I will"), ON), 60)
    assert (found.parent, found.fork_reason) == (-1, ForkReason.ASSISTANT_REWRITTEN)
    assert found.digests[1] == message_digest(reply("I will")), "what the client wrote is what is recorded"
    assert recording.echoes == {}
