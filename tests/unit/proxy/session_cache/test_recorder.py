"""Recordings are a cache of the store's rows: right under concurrency, eviction, deletion and re-use of an id."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from steno.contracts.errors import Gone, NotFound, ReplayDiverged
from steno.contracts.records import OPEN, IndexRow, Session, Timings, Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import OPEN_WAIT_S, Recording
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.prompt_index import IDS, digests
from steno_proxy.store.interface import RecordedOtherwise
from steno_proxy.store.memory.store import MemoryStore

USER = {"role": "user", "content": "hi"}


def turn_and_row(i: int) -> tuple[Turn, IndexRow]:
    reply = {"role": "assistant", "content": f"reply {i}"}
    turn = Turn(turn_id=f"{i:012x}", messages=[USER], reply=reply, timings=Timings(queued=1.0))
    digests = message_digest(USER) + message_digest(reply)
    return turn, IndexRow(turn.turn_id, -1, digests, b"\0" * 8, b"\0" * 8, "stop", False, 0, completion_tokens=0)


def recorder(store: MemoryStore, **options: object) -> Recorder:
    given = {"cache_bytes": 10**9, "implicit": True, "clock": lambda: 100.0} | options
    return Recorder(store, **given)  # type: ignore[arg-type]


async def test_an_unknown_trial_is_registered_only_where_that_is_allowed() -> None:
    store = MemoryStore()
    with pytest.raises(NotFound):
        await recorder(store, implicit=False).enter("t")
    assert (await recorder(store).enter("t")).session is not None


async def test_two_replicas_see_each_others_turns() -> None:
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here, there = await one.enter("t"), await two.enter("t")
    await one.commit(here, *turn_and_row(0))
    await two.commit(there, *turn_and_row(1))
    assert (here.turns, there.turns) == (1, 0)
    here, there = await one.enter("t"), await two.enter("t")
    assert here.tree.ids == there.tree.ids == ["000000000000", "000000000001"]


async def test_the_span_of_a_session_that_diverged_from_its_origin_comes_as_of_any_other_end() -> None:
    store, ended = MemoryStore(), list[Session]()
    cache = recorder(store)
    cache.traces = SimpleNamespace(ended=ended.append)  # type: ignore[assignment]
    await cache.enter("t")
    await cache.diverged("t", ReplayDiverged("new message 1 differs"))
    await cache.diverged("t", ReplayDiverged("of a second request"))
    assert {(session.trial_id, session.status, session.end_reason) for session in ended} == {
        ("t", "aborted", "replay_diverged")
    }
    await cache.close()


class SlowTail(MemoryStore):
    """A store that answers `tail` one event-loop turn later, so that requests overlap."""

    async def tail(self, trial_id: str, start: int, **options):  # type: ignore[no-untyped-def]
        found = await super().tail(trial_id, start, **options)
        await asyncio.sleep(0)
        return found


async def test_overlapping_requests_add_each_row_once() -> None:
    store = SlowTail()
    warm = recorder(store)
    recording = await warm.enter("t")
    for i in range(5):
        await warm.commit(recording, *turn_and_row(i))
    cold = recorder(store)
    found = await asyncio.gather(*(cold.enter("t") for _ in range(4)))
    assert len({id(recording) for recording in found}) == 1 and found[0].turns == 5


async def test_the_least_recently_used_are_dropped_and_rebuilt() -> None:
    store = MemoryStore()
    small = recorder(store, cache_bytes=1)
    await small.commit(await small.enter("a"), *turn_and_row(0))
    await small.enter("b")
    assert small.trees()[0] == 1
    assert (await small.enter("a")).turns == 1


class Counted(OrderedDict[str, Recording]):
    """Counts the recordings that are looked at."""

    looked_at = 0

    def items(self) -> Any:
        for item in super().items():
            self.looked_at += 1
            yield item


async def test_dropping_one_recording_looks_at_no_others() -> None:
    """A copy of 30,000 took 5 ms of the event loop, for each new trial."""
    full = recorder(MemoryStore(), cache_bytes=10_000 * 5000)
    full._recordings = held = Counted()
    for number in range(10_000):
        held[f"{number}"] = recording = Recording(f"{number}")
        recording.cost_bytes = 5000
    full._bytes = 10_000 * 5000
    held["0"].entering = 1  # a request has hold of it
    await full.enter("new")
    assert held.looked_at <= 5
    assert "0" in held and "1" not in held and "new" in held and len(held) > 9_995
    assert full.trees()[1] <= 10_000 * 5000


class Held(MemoryStore):
    """Answers whoever reads the trial `held` when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.reading, self.go = "", asyncio.Event(), asyncio.Event()

    async def tail(self, trial_id: str, start: int, **options):  # type: ignore[no-untyped-def]
        if trial_id == self.held:
            self.reading.set()
            await self.go.wait()
        return await super().tail(trial_id, start, **options)


def test_marks_of_plain_prompts_are_counted() -> None:
    """About as much as they weigh: they would take the cache beyond its bytes."""
    rows = []
    for number in range(2000):
        prompt = b"%08d" % number
        row = msgspec.structs.replace(turn_and_row(number)[1], options=IDS, digests=digests(prompt, prompt * 2))
        rows.append(row)
    costs, weights = [], []
    for found in (rows, [msgspec.structs.replace(row, options=b"\0" * 8) for row in rows]):
        recording = Recording("t")
        tracemalloc.start()
        for row in found:
            recording.add(row, 0.0)
        weights.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        costs.append(recording.recount())
    assert 0.5 < (costs[0] - costs[1]) / (weights[0] - weights[1]) < 2.0


async def test_what_was_dropped_while_a_request_read_it_counts_again_once_it_is_back() -> None:
    store = Held()
    small = recorder(store, cache_bytes=1)
    await small.commit(await small.enter("a"), *turn_and_row(0))
    store.held = "a"
    waiting = asyncio.ensure_future(small.enter("a"))
    await store.reading.wait()
    other = await small.enter("b")
    assert small.trees() == (1, other.cost_bytes)
    store.go.set()
    again = await waiting
    assert small.trees() == (1, again.cost_bytes) and again.cost_bytes > 0
    await small.enter("b")
    small.forget("b")
    assert small.trees() == (0, 0)


async def test_an_id_in_use_again_starts_a_new_tree(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of lost turns: the session that had them was deleted."""
    store = MemoryStore()
    keeper = recorder(store)
    await keeper.commit(await keeper.enter("t"), *turn_and_row(0))
    await store.complete("t", status="completed", reward=None, end_reason="x", metrics={}, now=100.0)
    with pytest.raises(Gone):
        await keeper.enter("t")
    assert await store.expire(now=10_000.0, retention_s=1.0) == 1
    await store.register(Session(trial_id="t", created_at=10_001.0, updated_at=10_001.0))
    assert (await keeper.enter("t")).turns == 0
    assert caplog.records == []


# -- turns that are on record while they are open


def open_turn(i: int) -> tuple[Turn, IndexRow]:
    turn, row = turn_and_row(i)
    open_ = turn.model_copy(update={"finish_reason": OPEN, "partial": True})
    return open_, msgspec.structs.replace(row, finish=OPEN, partial=True)


async def test_an_open_turn_that_runs_here_is_in_the_tree_once_it_has_ended() -> None:
    here = recorder(MemoryStore())
    recording = await here.enter("t")
    await here.commit(recording, *open_turn(0))
    await here.commit(recording, *turn_and_row(1))
    await here.commit(recording, *open_turn(0))
    assert (recording.turns, recording.tree.finishes, recording.open_here) == (2, [OPEN, "stop"], {"000000000000": 0})
    await here.enter("t")
    assert await here.commit(recording, *turn_and_row(0)) == 0
    assert (recording.tree.finishes, recording.open_here, recording.open_elsewhere) == (["stop", "stop"], {}, {})


async def test_tokens_that_were_saved_while_a_turn_was_open_count_once() -> None:
    """A trial's limit on tokens is held against them (I8)."""
    here = recorder(MemoryStore())
    recording = await here.enter("t")
    for (turn, row), tokens in ((open_turn(0), 3), (open_turn(0), 3), (turn_and_row(0), 5)):
        await here.commit(recording, turn, msgspec.structs.replace(row, completion_tokens=tokens))
        assert recording.sampled_tokens == tokens


async def test_an_open_turn_after_rows_that_are_not_read_yet_waits_for_them() -> None:
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here, there = await one.enter("t"), await two.enter("t")
    await one.commit(here, *turn_and_row(0))
    assert await two.commit(there, *open_turn(1)) == 1
    assert there.turns == 0
    await two.enter("t")
    assert (there.tree.ids, there.open_here) == (["000000000000", "000000000001"], {"000000000001": 1})


class GrowsMeanwhile(MemoryStore):
    """A turn that grows after its row was read, once `rival` says how."""

    rival: tuple[Turn, IndexRow] | None = None

    async def turns(self, trial_id: str, **options):  # type: ignore[no-untyped-def]
        if self.rival is not None:
            (turn, row), self.rival = self.rival, None
            await self.commit(trial_id, turn, row, now=1.0)
        return await super().turns(trial_id, **options)


async def test_a_turn_that_grows_while_it_is_sealed_is_left_as_it_is() -> None:
    """What its proxy has recorded since must not be undone (I4)."""
    store = GrowsMeanwhile()
    one, two = recorder(store), recorder(store)
    turn, row = open_turn(0)
    await one.commit(await one.enter("t"), turn, row)
    there = await two.enter("t")
    longer = turn.model_copy(update={"completion_ids": bytes(8), "sampling_logprobs": bytes(8)})
    store.rival = longer, msgspec.structs.replace(row, completion_tokens=2, path_tokens=2)
    await two.seal(there, 0)
    assert (there.tree.finishes, there.tree.tokens[0]) == ([OPEN], 2)
    [on_record] = await store.turns("t")
    assert (on_record.finish_reason, on_record.completion_tokens) == (OPEN, 2)


async def test_a_turn_that_ends_while_it_is_sealed_is_left_as_it_is() -> None:
    """Its proxy was faster, after it was read."""

    class EndsMeanwhile(MemoryStore):
        async def turns(self, trial_id: str, **options):  # type: ignore[no-untyped-def]
            found = await super().turns(trial_id, **options)
            await one.commit(here, *turn_and_row(0))
            return found

    store = EndsMeanwhile()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    await one.commit(here, *open_turn(0))
    there = await two.enter("t")
    await two.seal(there, 0)
    assert (there.tree.finishes, here.tree.finishes) == (["stop"], ["stop"])


async def test_a_replica_that_saw_a_turn_open_reads_it_again_until_it_is_whole() -> None:
    store, reads = MemoryStore(), []

    class Watched(MemoryStore):
        async def tail(self, trial_id: str, start: int, *, known: int = 0):  # type: ignore[no-untyped-def]
            reads.append((start, known))
            return await store.tail(trial_id, start, known=known)

    one, two = recorder(store), recorder(Watched())
    here = await one.enter("t")
    await one.commit(here, *turn_and_row(0))
    await one.commit(here, *open_turn(1))
    there = await two.enter("t")
    assert (there.tree.finishes, list(there.open_elsewhere)) == (["stop", OPEN], [1])
    await one.commit(here, *turn_and_row(2))
    assert (await two.enter("t")).tree.finishes == ["stop", OPEN, "stop"]
    await one.commit(here, *turn_and_row(1))
    there = await two.enter("t")
    assert (there.tree.finishes, there.open_elsewhere) == (["stop"] * 3, {})
    await two.enter("t")
    after = "after the last that is known: from the open one on; all anew once it has changed; then only what is new"
    assert reads == [(0, 0), (0, 1), (0, 1), (0, 0), (2, 1)], after


async def test_a_replica_that_saw_a_turn_open_reads_it_again_once_it_has_grown() -> None:
    """It was saved again, still open: a second block of its answer was closed."""
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    turn, row = open_turn(0)
    await one.commit(here, turn, row)
    assert (await two.enter("t")).tree.tokens[0] == row.path_tokens
    more = msgspec.structs.replace(row, path_tokens=row.path_tokens + 5)
    await one.commit(here, turn, more)
    there = await two.enter("t")
    assert (there.tree.tokens[0], there.tree.finishes) == (row.path_tokens + 5, [OPEN])


async def test_a_turn_that_stays_open_is_given_up_in_the_end() -> None:
    store, now = MemoryStore(), [100.0]
    one, two = recorder(store), recorder(store, clock=lambda: now[0])
    await one.commit(await one.enter("t"), *open_turn(0))
    there = await two.enter("t")
    assert there.open_elsewhere == {0: 100.0 + OPEN_WAIT_S}
    now[0] += OPEN_WAIT_S
    assert (await two.enter("t")).open_elsewhere == {} and there.tree.finishes == [OPEN]


async def test_a_turn_whose_end_could_not_be_committed_is_what_is_on_record_of_it() -> None:
    here = recorder(MemoryStore())
    recording = await here.enter("t")
    await here.commit(recording, *open_turn(0))
    here.give_up(recording, "000000000000")
    assert recording.turns == 0
    await here.enter("t")
    assert (recording.open_here, list(recording.open_elsewhere), recording.tree.partial(0)) == ({}, [0], True)


async def test_overlapping_requests_and_an_open_turn_of_a_replica() -> None:
    store = SlowTail()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    await one.commit(here, *open_turn(0))
    asks = [asyncio.ensure_future(two.enter("t")) for _ in range(3)]
    await one.commit(here, *turn_and_row(1))
    asks += [asyncio.ensure_future(two.enter("t")) for _ in range(3)]
    await one.commit(here, *turn_and_row(0))
    await asyncio.gather(*asks)
    assert (await two.enter("t")).tree.finishes == ["stop", "stop"]


async def test_an_open_turn_that_is_gone_on_from_is_sealed() -> None:
    """What its proxy commits later changes nothing, and it is told so; had it been faster, there would be nothing to seal."""
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    await one.commit(here, *open_turn(0))
    await one.commit(here, *open_turn(1))
    there = await two.enter("t")
    await one.commit(here, *turn_and_row(1))
    await two.seal(there, 1)
    assert there.tree.finishes == [OPEN, "stop"]
    await two.seal(there, 0)
    assert (there.tree.finishes, there.open_elsewhere) == (["cancelled", "stop"], {})
    with pytest.raises(RecordedOtherwise):
        await one.commit(here, *turn_and_row(0))
    first, _ = await store.turns("t")
    assert (first.finish_reason, first.partial) == ("cancelled", True)
    assert first.error is not None and first.error.startswith("proxy_lost")


@pytest.mark.parametrize("by", ["another replica", "this one"])
async def test_what_goes_on_from_a_turn_that_runs_here_has_its_place_after_that_turns_reply(by: str) -> None:
    """On record the turn has ended, and this replica does not know yet: it was sealed, or its commit is not answered yet."""
    store = MemoryStore()
    one, two = recorder(store), recorder(store)
    here = await one.enter("t")
    await one.commit(here, *open_turn(0))
    await one.commit(here, *open_turn(1))
    there = await two.enter("t")
    if by == "this one":
        await store.commit("t", *turn_and_row(0), now=100.0)
    else:
        await two.seal(there, 0)
    turn, row = turn_and_row(2)
    turn.parent_id = "000000000000"
    await two.commit(await two.enter("t"), turn, msgspec.structs.replace(row, parent=0))
    assert await one.enter("t") is here
    asked = [message_digest(said) for said in (USER, {"role": "assistant", "content": "reply 0"}, USER)]
    assert here.tree.turns_asked(asked, row.tools, row.options) == [2]
    assert (here.open_here, here.open_elsewhere) == ({"000000000001": 1}, {})
    if by == "this one":
        assert await one.commit(here, *turn_and_row(0)) == 0
    assert (here.turns, here.tree.finishes[1:]) == (3, [OPEN, "stop"])
