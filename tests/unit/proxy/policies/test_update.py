"""One update as a state machine: facts in, frames out, whatever the order of what workers say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.errors import ProtocolError
from steno.contracts.policy import Want
from steno.contracts.wire.frames import Progress
from steno_proxy.policies.member import FIRST_RETRY_S, RESEND_S, ShardCursor
from steno_proxy.policies.update import LOADING_S, MAX_CREDIT_BYTES, MISSED, FrameKind, MemberFrame, UpdateRun
from tests.support.contracts.policy import SHARD_BYTES, spec

DEADLINE_S = 100.0


def run(*, settle_until: float = 0.0, state: str = "running", **fields: Any) -> UpdateRun:
    asked = spec(1, **({"deadline_s": DEADLINE_S} | fields))
    return UpdateRun("u", asked, number=1, created_at=0.0, since=0.0, settle_until=settle_until, state=state)


def stream(**fields: Any) -> UpdateRun:
    return run(transport="stream", location="", **fields)


def said(state: str, **fields: Any) -> Progress:
    return Progress("u", state, **fields)


def test_those_that_are_there_are_awaited_and_those_that_come_later_are_not() -> None:
    update = run()
    assert update.join("a", "base/0", 0.0) == [MemberFrame("a", FrameKind.PREPARE)]
    update.join("b", "base/0", 0.0)
    assert update.join("late", "base/0", 1.0) == [MemberFrame("late", FrameKind.PREPARE)]
    assert update.progress("a", said("ready"), 2.0) == []
    assert update.progress("b", said("ready"), 3.0) == [
        MemberFrame("a", FrameKind.APPLY),
        MemberFrame("b", FrameKind.APPLY),
    ]
    assert update.progress("late", said("ready"), 4.0) == [MemberFrame("late", FrameKind.APPLY)]


def test_a_proxy_that_has_just_started_waits_for_workers_to_dial() -> None:
    update = run(settle_until=3.0)
    update.join("a", "base/0", 0.0)
    assert update.progress("a", said("ready"), 1.0) == []
    assert update.next_deadline() == 3.0
    update.join("b", "base/0", 2.0)
    assert update.tick(3.0) == [], "it came within those seconds, and is awaited"
    assert update.progress("b", said("ready"), 4.0) == [
        MemberFrame("a", FrameKind.APPLY),
        MemberFrame("b", FrameKind.APPLY),
    ]


def test_who_serves_the_version_already_is_asked_nothing() -> None:
    update = run()
    assert update.join("a", "run-a/1", 0.0) == []
    assert (update.state, update.served) == ("done", True)


def test_without_workers_it_waits_until_the_deadline() -> None:
    update = run()
    assert (update.tick(DEADLINE_S - 1), update.state, update.next_deadline()) == ([], "running", DEADLINE_S)
    update.tick(DEADLINE_S)
    assert (update.state, update.ended_at, update.next_deadline()) == ("failed", DEADLINE_S, None)


def test_who_comes_long_after_the_end_has_as_long_to_load_as_the_others_had() -> None:
    update = run(state="done", deadline_s=600.0)
    update.join("a", "base/0", 5000.0)
    update.progress("a", said("ready"), 5010.0)
    for now in range(5020, 5140, 10):
        update.progress("a", said("loading"), now)
        assert update.view().workers[0].error is None, now
    assert update.next_deadline() == 5010.0 + 600.0
    update.tick(5010.0 + 600.0)
    assert update.view().workers[0].error == "deadline: not loaded in time"


def test_who_loads_for_too_long_is_named_and_may_still_get_there() -> None:
    update = run()
    update.join("a", "base/0", 0.0)
    assert update.progress("a", said("ready"), DEADLINE_S - 1) == [MemberFrame("a", FrameKind.APPLY)]
    assert update.next_deadline() in (DEADLINE_S, DEADLINE_S - 1 + LOADING_S)
    update.tick(DEADLINE_S + 1)
    assert update.state == "running", "it was told a moment ago"
    update.tick(DEADLINE_S - 1 + LOADING_S)
    assert update.view().workers[0].error == "deadline: not loaded in time"
    assert update.state == "failed"
    update.progress("a", said("served", pause_s=3.0, load_s=120.0), DEADLINE_S + 200)
    assert (update.state, update.view().workers[0].pause_s) == ("done", 3.0)


def test_failed_workers_are_tried_again_ever_more_seldom_once_the_others_serve() -> None:
    update = run()
    update.join("good", "base/0", 0.0)
    update.join("bad", "base/0", 0.0)
    update.progress("bad", said("failed", code="weights_refused", message="no"), 1.0)
    update.progress("good", said("ready"), 1.0)
    update.progress("good", said("served"), 2.0)
    assert update.state == "done"
    at, waits = 1.0, []
    for _ in range(4):
        due = update.next_deadline()
        assert due is not None
        assert update.tick(due - 0.01) == []
        assert update.tick(due) == [MemberFrame("bad", FrameKind.PREPARE)]
        waits.append(due - at)
        at = due
        update.progress("bad", said("failed", code="weights_refused", message="no"), at)
    assert waits == [FIRST_RETRY_S * 2**n for n in range(4)]


def test_what_goes_over_nccl_brings_nobody_along_that_was_not_in_the_group() -> None:
    update = run(transport="nccl", location="{}")
    for name in ("a", "b"):
        update.join(name, "base/0", 0.0)
        update.progress(name, said("ready"), 1.0)
    assert update.applied
    update.progress("a", said("served"), 2.0)
    update.progress("b", said("failed", code="probe", message="differs"), 2.0)
    assert update.state == "done"
    assert update.join("late", "base/0", 3.0) == []
    assert update.tick(1_000.0) == [], "neither is asked again"
    workers = {worker.worker_id: worker for worker in update.view().workers}
    assert {name: worker.state for name, worker in workers.items()} == {"a": "served", "b": "failed", "late": "failed"}
    assert workers["late"].error == MISSED
    assert workers["b"].error == f"{MISSED}: probe: differs"
    assert update.next_deadline() is None


def test_a_failed_update_rests_until_it_is_posted_again() -> None:
    update = run()
    update.join("a", "base/0", 0.0)
    update.progress("a", said("failed", code="weights_refused", message="no"), 1.0)
    assert (update.state, update.next_deadline(), update.tick(50.0)) == ("failed", None, [])
    assert update.join("b", "base/0", 51.0) == []
    assert set(update.revive(60.0, 60.0)) == {MemberFrame("a", FrameKind.PREPARE), MemberFrame("b", FrameKind.PREPARE)}
    assert (update.state, update.since, update.next_deadline()) == ("running", 60.0, 60.0 + DEADLINE_S)


def test_superseded_it_tells_those_that_do_not_load_to_forget() -> None:
    update = run()
    for worker, state in (("waits", ""), ("stages", "receiving"), ("is ready", "ready"), ("has failed", "failed")):
        update.join(worker, "base/0", 0.0)
        if state:
            update.progress(worker, said(state), 1.0)
    update.join("loads", "base/0", 0.0)
    update.progress("loads", said("loading"), 1.0)
    assert {step.worker_id for step in update.supersede(2.0)} == {"waits", "stages", "is ready"}
    assert update.supersede(3.0) == []
    assert (update.state, update.ended_at) == ("superseded", 2.0)
    assert update.progress("is ready", said("ready"), 4.0) == []
    update.progress("loads", said("served"), 5.0)
    assert update.served


def test_wants_are_what_workers_lack_and_have_room_for() -> None:
    update = stream()
    for worker in ("a", "b", "c", "full"):
        update.join(worker, "base/0", 0.0)
    name = [shard.name for shard in update.spec.manifest.shards]
    update.progress("a", said("receiving", shard=name[1], offset=10, credit=100), 1.0)
    update.progress("b", said("receiving", shard=name[0], offset=7, credit=100), 1.0)
    update.progress("c", said("receiving", shard=name[1], offset=10, credit=5), 1.0)
    update.progress("full", said("receiving", shard=name[0], offset=3, credit=0), 1.0)
    assert update.wants() == [Want(shard=name[0], offset=7), Want(shard=name[1], offset=10)]
    cursor = update.members["b"].cursor
    assert cursor is not None
    cursor.advance(107, 2.0)
    assert update.wants() == [Want(shard=name[1], offset=10)], "all that it had room for is on the way"
    update.progress("b", said("receiving", shard=name[0], offset=107, credit=100), 3.0)
    assert update.wants()[0] == Want(shard=name[0], offset=107)
    cursor.advance(200, 4.0)
    assert update.next_deadline() == 4.0 + RESEND_S
    update.tick(4.0 + RESEND_S)
    assert update.wants()[0] == Want(shard=name[0], offset=107), "nothing was confirmed for a long time"


def test_bytes_that_came_another_way_are_not_sent_again_and_lost_ones_are() -> None:
    update = stream()
    update.join("a", "base/0", 0.0)
    name = update.spec.manifest.shards[0].name
    update.progress("a", said("receiving", shard=name, offset=0, credit=500), 1.0)
    update.progress("a", said("receiving", shard=name, offset=400, credit=500), 2.0)
    assert update.wants() == [Want(shard=name, offset=400)], "by way of another replica"
    update.progress("a", said("receiving", shard=name, offset=100, credit=500), 3.0)
    assert update.wants() == [Want(shard=name, offset=100)], "it lost its disk"
    update.progress("a", said("receiving", shard=name, offset=100, credit=2**40), 3.0)
    cursor = update.members["a"].cursor
    assert cursor is not None
    assert cursor.limit == 100 + MAX_CREDIT_BYTES


def test_two_proxies_that_cut_a_shard_otherwise_do_not_stall_each_other() -> None:
    """A worker takes what begins where it is. The chunk that lies across the end of what another proxy sent is left out."""
    cursor = ShardCursor("s", 0, 0, 10_000, 0.0)
    for end in (250, 500, 750):
        cursor.advance(end, 1.0)
    cursor.report(500, 10_000, 2.0)
    assert cursor.sent == 750, "at an end of ours: what follows it is on its way"
    cursor.advance(1000, 2.0)
    cursor.report(800, 10_000, 3.0)
    assert cursor.sent == 800, "in the middle of ours: it will not be taken"
    cursor.report(1200, 10_000, 4.0)
    assert cursor.sent == 1200
    cursor.advance(1300, 5.0)
    cursor.report(1200, 10_000, 6.0)
    assert cursor.sent == 1300, "said again, it says nothing"


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "dancing"},
        {"state": "receiving", "shard": "other.safetensors"},
        {"state": "receiving", "shard": "model-0.safetensors", "offset": SHARD_BYTES + 1},
        {"state": "receiving", "shard": "model-0.safetensors", "offset": -1},
        {"state": "receiving", "shard": "model-0.safetensors", "credit": -1},
        {"state": "served", "pause_s": float("nan")},
        {"state": "served", "load_s": float("inf")},
        {"state": "served", "pause_s": -0.1},
    ],
)
def test_what_cannot_be_breaks_the_protocol(wrong: dict[str, Any]) -> None:
    update = stream()
    update.join("a", "base/0", 0.0)
    with pytest.raises(ProtocolError):
        update.progress("a", Progress("u", **wrong), 1.0)


WORKERS = ["a", "b", "c"]
FACTS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(WORKERS), st.sampled_from(["base/0", "run-a/1"])),
    st.tuples(st.just("announced"), st.sampled_from(WORKERS), st.sampled_from(["base/0", "run-a/1", ""])),
    st.tuples(st.just("leave"), st.sampled_from(WORKERS)),
    st.tuples(
        st.just("progress"), st.sampled_from(WORKERS),
        st.sampled_from(["waiting", "receiving", "ready", "loading", "served", "failed"]),
    ),
    st.tuples(st.just("tick")),
    st.tuples(st.just("supersede")),
    st.tuples(st.just("revive")),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.tuples(FACTS, st.floats(0.0, 30.0)), max_size=60), st.booleans())
def test_whatever_happens_it_ends_by_its_deadlines_and_orders_make_sense(
    facts: list[tuple[tuple[Any, ...], float]], streamed: bool
) -> None:
    """I10: a worker is told to load only what it said is ready; what has served stays so; and every update comes to an end."""
    update = stream() if streamed else run()
    now, ended = 0.0, ""
    for (what, *given_), wait_s in facts:
        now += wait_s
        before = {name: member.state for name, member in update.members.items()}
        if what in ("tick", "supersede"):
            steps = getattr(update, what)(now)
        elif what == "revive":
            steps = update.revive(now, now) if update.state == "failed" else []
        elif what == "progress":
            shard = update.spec.manifest.shards[0].name
            steps = update.progress(given_[0], said(given_[1], shard=shard, offset=0, credit=10), now)
            before[given_[0]] = given_[1]
        elif what == "leave":
            steps = update.leave(given_[0], now)
        else:
            steps = getattr(update, what)(given_[0], given_[1], now)
        for step in steps:
            if step.do is FrameKind.APPLY:
                assert before.get(step.worker_id) == "ready"
                assert update.state != "superseded"
            if step.do is FrameKind.PREPARE:
                assert update.state in ("running", "done") or now >= update.since + DEADLINE_S
        if ended == "superseded":
            assert update.state == "superseded"
        if ended == "done":
            assert update.state in ("done", "superseded")
        ended = update.state
        due = update.next_deadline()
        assert due is None or due > now or update.tick(due) is not None
        update.view()
    for _ in range(6):
        now += DEADLINE_S + LOADING_S
        update.tick(now)
    assert update.state != "running"
    if update.state == "done":
        assert update.served
