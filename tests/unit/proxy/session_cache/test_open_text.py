"""Open turns of models that give text alone: what has come of one shows in no count, and whoever goes on from it closes it."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import OPEN, IndexRow, Timings, Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.store.interface import SessionTail
from steno_proxy.store.memory.store import MemoryStore
from tests.unit.proxy.trial import HI, ON, Trial, reply

MOST_READS = 60


class Bounded(MemoryStore):
    """Of a request that reads without end the test fails, instead of hanging."""

    reads = 0

    async def tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        self.reads += 1
        assert self.reads < MOST_READS, "it reads for ever"
        return await super().tail(trial_id, start, known=known)


class Growing(Bounded):
    """The turn has always grown since its row was read."""

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        found = await super().turns(trial_id, start=start, limit=limit)
        return [turn.model_copy(update={"reply": reply("I will. And more.")}) for turn in found]


def open_text(said: str) -> tuple[Turn, IndexRow]:
    turn = Turn(
        turn_id="0" * 12,
        messages=[HI],
        reply=reply(said),
        partial=True,
        finish_reason=OPEN,
        timings=Timings(queued=1.0),
    )
    digests = message_digest(HI) + message_digest(turn.reply)
    return turn, IndexRow("0" * 12, -1, digests, tools_digest([]), options_digest({}), OPEN, True, 0)


async def begun(store: Bounded) -> tuple[Trial, Recorder]:
    """A trial whose one turn is open at another replica, which is returned."""
    trial = Trial()
    trial.store = store  # type: ignore[assignment]
    trial.recorder, other = trial.replica(), trial.replica()
    await other.commit(await other.enter("t"), *open_text("I will."))
    return trial, other


async def test_an_open_turn_that_nobody_counted_is_closed_by_who_goes_on_from_it() -> None:
    trial, _ = await begun(Bounded())
    found = await trial.asked(HI, reply("I will."), ON)
    assert (found.parent, found.fork_reason, found.prefix.messages) == (0, None, 2)
    [turn] = await trial.store.turns("t")
    assert (turn.finish_reason, turn.reply) == ("cancelled", reply("I will."))
    assert turn.error is not None and turn.error.startswith("proxy_lost")


async def test_one_that_can_not_be_closed_is_an_error_that_passes() -> None:
    trial, _ = await begun(Growing())
    with pytest.raises(StoreUnavailable) as told:
        await trial.asked(HI, reply("I will."), ON)
    assert told.value.retryable
    assert [turn.finish_reason for turn in await MemoryStore.turns(trial.store, "t")] == [OPEN]


async def test_what_has_come_since_of_a_turn_that_nobody_counts_is_read_by_other_replicas() -> None:
    trial, other = await begun(Bounded())
    assert (await trial.recorder.enter("t")).open_elsewhere.keys() == {0}
    said: Any = "I will. Then I look."
    await other.commit(await other.enter("t"), *open_text(said))
    found = await trial.asked(HI, reply(said), ON)
    assert (found.parent, found.echoed_as) == (0, None)
