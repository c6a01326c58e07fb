"""Versions, how far back they are, and that admission keeps the bound it promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_bridge.errors import BadBatch
from trainer_bridge.ledger import Reason
from trainer_bridge.staleness import History, Version, admissible_groups, judge

PATH = History((Version("base", 0), Version("a", 40), Version("b", 57)))


def test_a_version_is_a_lineage_and_a_step_and_writes_as_it_reads():
    assert Version.parse("run-7.x/12") == Version("run-7.x", 12)
    assert str(Version("a", 3)) == "a/3"


@pytest.mark.parametrize("text", ["", "a", "a/", "/1", "a/-1", "a/1.0", "a/01", "a/1/2", "a/x", "a/1\n"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match="no version"):
        Version.parse(text)


@pytest.mark.parametrize(
    ("version", "steps"),
    [("b/57", 0), ("b/40", 17), ("a/40", 17), ("a/1", 56), ("a/0", 57), ("base/0", 57),
     ("a/41", None), ("b/39", None), ("b/58", None), ("base/1", None), ("c/50", None)],
)  # fmt: skip
def test_staleness_counts_steps_across_lineages_and_knows_orphans(version, steps):
    assert PATH.staleness_steps(Version.parse(version)) == steps


def test_a_history_grows_by_steps_and_by_resuming():
    history = History((Version("base", 0),)).resumed("a").stepped().stepped().resumed("b").stepped()
    assert history.path == (Version("base", 0), Version("a", 2), Version("b", 3))
    with pytest.raises(BadBatch, match="history"):
        history.resumed("a")
    with pytest.raises(BadBatch, match="history"):
        History((Version("a", 2), Version("b", 1)))


def test_the_oldest_version_decides():
    assert judge(PATH, ["b/57", "b/55", "b/56"], 2).reason is None
    verdict = judge(PATH, ["b/57", "b/54"], 2)
    assert (verdict.reason, verdict.staleness_steps) == (Reason.STALE, 3)


def test_staleness_is_what_grew_in_flight_and_in_the_queue():
    verdict = judge(PATH, ["b/52", "b/55"], 9)
    assert (verdict.staleness_steps, verdict.in_flight_steps, verdict.queue_steps) == (5, 3, 2)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (["b/57", "a/41"], Reason.ORPHANED),
        (["other/1"], Reason.ORPHANED),
        (["b/58"], Reason.BAD_VERSION),
        (["7"], Reason.BAD_VERSION),
    ],
)
def test_what_is_not_in_the_history_is_named(versions, reason):
    assert judge(PATH, versions, 100).reason is reason


def test_no_version_at_all_can_not_be_judged():
    with pytest.raises(BadBatch, match="without a version"):
        judge(PATH, [], 1)


def test_on_policy_admits_one_steps_groups():
    assert admissible_groups(in_hand=0, groups_per_step=8, max_staleness_steps=0) == 8
    assert admissible_groups(in_hand=5, groups_per_step=8, max_staleness_steps=0) == 3
    assert admissible_groups(in_hand=20, groups_per_step=8, max_staleness_steps=1) == 0


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_admission_in_order_never_trains_a_stale_group(per_step, bound, seed):
    rng = random.Random(seed)
    started: list[int] = []
    step = 0
    for _ in range(60):
        room = admissible_groups(in_hand=len(started), groups_per_step=per_step, max_staleness_steps=bound)
        started += [step] * rng.randint(0, room)
        if len(started) >= per_step and rng.random() < 0.7:
            batch, started = started[:per_step], started[per_step:]
            assert all(step - group <= bound for group in batch)
            step += 1
