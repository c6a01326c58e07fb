"""Which recorded reply a message stands for, where several may be meant, and what it costs to find out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from proxy.contracts.canonical import Job, Tool
from proxy.contracts.records import ForkReason, IndexRow, Timings, Turn
from proxy.pace import Pace
from proxy.plan import MOST_CANDIDATES, Plan, plan
from proxy.recorder import Recorder
from proxy.sessions.normalise import message_digest, options_digest, tools_digest
from proxy.store.base import Path
from proxy.store.memory import MemoryStore

TOOL: list[Tool] = [{"type": "function", "function": {"name": "f"}}]
HI, ON = {"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}


class Counting(MemoryStore):
    """Counts what is read of turns."""

    reads = 0

    async def path(self, trial_id: str, numbers: Sequence[int]) -> Path:
        self.reads += 1
        return await super().path(trial_id, numbers)


class Trial:
    def __init__(self) -> None:
        self.store = Counting()
        self.recorder = self.replica()
        self._number = 0

    def replica(self) -> Recorder:
        return Recorder(self.store, cache_bytes=10**9, implicit=True, clock=lambda: 100.0)

    async def said(
        self, text: str, *asked: dict[str, Any], partial: bool = False, after: int = -1, tools: Sequence[Tool] = ()
    ) -> int:
        """A reply on record, to `asked` (HI). Returns its turn's number."""
        messages = asked or (HI,)
        turn_id, reply = f"{self._number:012x}", {"role": "assistant", "content": text}
        self._number += 1
        turn = Turn(turn_id=turn_id, messages=[*messages], reply=reply, partial=partial, timings=Timings(queued=1.0))
        digests = b"".join(map(message_digest, (*messages, reply)))
        keys, finish = (tools_digest(tools), options_digest({})), "cancelled" if partial else "stop"
        row = IndexRow(turn_id, after, digests, *keys, finish, partial, 1, completion_tokens=1)
        recording = await self.recorder.enter("t")
        return await self.recorder.commit(recording, turn, row)

    async def asked(self, *messages: dict[str, Any], recorder: Recorder | None = None) -> Plan:
        recorder = recorder or self.recorder
        return await plan(recorder, await recorder.enter("t"), Job(messages=[*messages]), Pace())


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


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
    assert (found.parent, found.fork_reason, len(found.echoes), trial.store.reads) == (parent, None, 50, 51)
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
    assert found.echoes == {} and recording.echoes == {}, "what the client wrote is what is recorded"
