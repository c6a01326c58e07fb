"""A trial whose turns are put on record by hand, in any number of replicas, and whose requests are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steno.contracts.chat import Job, Tool
from steno.contracts.records import IndexRow, Timings, Turn
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.store.interface import TokenPath
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.continuation import Plan, plan

TOOL: list[Tool] = [{"type": "function", "function": {"name": "f"}}]
HI, ON = {"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}


class Counting(MemoryStore):
    """Counts what is read of turns."""

    reads = 0

    async def path(self, trial_id: str, numbers: Sequence[int]) -> TokenPath:
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
        self, text: str, *asked: dict[str, Any], partial: bool = False, after: int = -1, tools: Sequence[Tool] = (),
        calls: Sequence[dict[str, Any]] = (), reasoning: str = "",
    ) -> int:  # fmt: skip
        """A reply on record, to `asked` (HI), each message for itself. Returns its turn's number."""
        messages = asked or (HI,)
        turn_id, reply = f"{self._number:012x}", {"role": "assistant", "content": text}
        if calls:
            reply["tool_calls"] = [*calls]
        if reasoning:
            reply["reasoning_content"] = reasoning
        self._number += 1
        turn = Turn(turn_id=turn_id, messages=[*messages], reply=reply, partial=partial, timings=Timings(queued=1.0))
        digests = b"".join(map(message_digest, (*messages, reply)))
        keys, finish = (tools_digest(tools), options_digest({})), "cancelled" if partial else "stop"
        row = IndexRow(turn_id, after, digests, *keys, finish, partial, 1, [""] * len(calls), completion_tokens=1)
        recording = await self.recorder.enter("t")
        return await self.recorder.commit(recording, turn, row)

    async def asked(
        self,
        *messages: dict[str, Any],
        recorder: Recorder | None = None,
        merges: bool = False,
        tools: Sequence[Tool] = (),
    ) -> Plan:
        recorder = recorder or self.recorder
        job = Job(messages=[*messages], tools=[*tools])
        return await plan(recorder, await recorder.enter("t"), job, Pace(), merges=merges)


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
