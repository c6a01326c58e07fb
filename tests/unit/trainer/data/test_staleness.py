"""Versions, how far back they are, and that admission keeps the bound it promises."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno_rollouts.groups.admission import admissible_groups
from steno_trainer.data.ledger import Reason
from steno_trainer.data.staleness import PolicyVersion, VersionHistory, judge
from steno_trainer.errors import BadBatch

PATH = VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 40), PolicyVersion("b", 57)))


def test_a_version_is_a_lineage_and_a_step_and_writes_as_it_reads():
    assert PolicyVersion.parse("run-7.x/12") == PolicyVersion("run-7.x", 12)
    assert str(PolicyVersion("a", 3)) == "a/3"


@pytest.mark.parametrize("text", ["", "a", "a/", "/1", "a/-1", "a/1.0", "a/01", "a/1/2", "a/x", "a/1\n"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match="not a version: must be <lineage>/<step>"):
        PolicyVersion.parse(text)


@pytest.mark.parametrize(
    ("version", "steps"),
    [("b/57", 0), ("b/40", 17), ("a/40", 17), ("a/1", 56), ("a/0", 57), ("base/0", 57),
     ("a/41", 18), ("b/39", None), ("b/58", None), ("base/1", None), ("c/50", None)],
)  # fmt: skip
def test_staleness_counts_steps_across_lineages_and_knows_orphans(version, steps):
    found = PATH.behind(PolicyVersion.parse(version))
    assert (None if found is None else found.steps) == steps


LOST = {
    "x": (PolicyVersion("a", 40), 42),
    "y": (PolicyVersion("a", 41), 41),
    "z": (PolicyVersion("y", 41), 43),
    "a": (PolicyVersion("base", 0), 42),
    "odd": (PolicyVersion("nobody", 3), 90),
    "loop": (PolicyVersion("loop", 0), 91),
    "b": (PolicyVersion("a", 40), 57),
}


@pytest.mark.parametrize(
    ("version", "behind"),
    [
        ("a/42", (17 + 2, 2)), ("x/40", (17, 0)), ("x/42", (17 + 2, 2)), ("y/41", (17 + 1, 1)), ("z/43", (17 + 3, 3)),
        ("x/39", None), ("odd/4", None), ("loop/1", None), ("a/1", (56, 0)), ("b/57", (0, 0)),
    ],
)  # fmt: skip
def test_lost_steps_are_counted_back_and_forward_again(version, behind):
    history = PATH.knowing(LOST)
    assert history.behind(PolicyVersion.parse(version)) == behind
    assert set(history.lost) == {(40, 42), (40, 41), (40, 43)}
    assert history.stepped().resumed("c").lost == history.lost


def test_what_a_crash_took_back_makes_nothing_too_old():
    """At a/2 a trainer with a bound of 1 was saved, at a/4 it died: groups up to the sixth step's were admitted."""
    resumed = VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 2), PolicyVersion("b", 2)))
    history = resumed.knowing({"a": (PolicyVersion("base", 0), 4)})
    for step in range(2, 9):
        verdicts = {text: judge(history, [text], 1).reason for text in ("a/1", "a/2", "a/3", "a/4", "b/2")}
        assert verdicts.pop("a/1") is (None if step <= 2 else Reason.STALE), "what was late before is late"
        assert set(verdicts.values()) == {None if step <= 5 else Reason.STALE}, step
        history = history.stepped()
    assert judge(history, ["b/8"], 1).reason is None and judge(history, ["b/7"], 1).reason is Reason.STALE
    assert judge(resumed.stepped(), ["a/1"], 1).reason is Reason.STALE, "without a crash it is"


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_no_crash_makes_a_group_stale_that_admission_let_in(per_step, bound, every, seed):
    """Checkpoints every so many steps, a push after each; crashes anywhere; groups are trained in their order, sampled by
    whatever is served while they run, and used ones come back. Nothing that is trained is further behind than the bound and
    twice the lost steps."""
    rng = random.Random(seed)
    history = VersionHistory((PolicyVersion("base", 0),)).resumed("l0")
    others = {}
    queue: list[list[str]] = []  # versions that each group was sampled by
    used: list[list[str]] = []  # by steps since the checkpoint
    saved, parent = history, PolicyVersion("base", 0)
    for start in range(1, 80):
        served = str(history.current)
        room = admissible_groups(in_hand=len(queue), groups_per_step=per_step, max_staleness_steps=bound)
        queue += [[served] for _ in range(rng.randint(0, room))]
        for group in queue:
            if rng.random() < 0.5 and group[-1] != served:
                group.append(served)  # a trial of it that started later
        if rng.random() < 0.15:
            others[history.current.lineage] = (parent, history.current.step)
            queue, used = used + queue, []
            parent = saved.current
            history = saved.resumed(f"l{start}").knowing(others)
        elif len(queue) >= per_step:
            batch, queue = queue[:per_step], queue[per_step:]
            for group in batch:
                verdict = judge(history, group, bound)
                assert verdict.reason is None, (history, group)
                assert verdict.staleness_steps is not None and verdict.staleness_steps <= bound + 2 * (every - 1)
            used += batch
            history = history.stepped()
            if history.current.step % every == 0:
                saved, used = history, []


def test_a_history_grows_by_steps_and_by_resuming():
    history = VersionHistory((PolicyVersion("base", 0),)).resumed("a").stepped().stepped().resumed("b").stepped()
    assert history.path == (PolicyVersion("base", 0), PolicyVersion("a", 2), PolicyVersion("b", 3))
    with pytest.raises(BadBatch, match="history"):
        history.resumed("a")
    with pytest.raises(BadBatch, match="history"):
        VersionHistory((PolicyVersion("a", 2), PolicyVersion("b", 1)))


def test_the_oldest_version_decides_wherever_it_stands():
    for versions in itertools.permutations(["b/57", "b/55", "b/56"]):
        assert judge(PATH, versions, 2).reason is None
    for versions in itertools.permutations(["b/57", "b/54", "b/56"]):
        verdict = judge(PATH, versions, 2)
        assert (verdict.reason, verdict.staleness_steps) == (Reason.STALE, 3), versions


def test_staleness_is_what_grew_in_flight_and_in_the_queue():
    verdict = judge(PATH, ["b/52", "b/55"], 9)
    assert (verdict.staleness_steps, verdict.in_flight_steps, verdict.queue_steps) == (5, 3, 2)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        (["b/57", "c/41"], Reason.ORPHANED),
        (["other/1"], Reason.ORPHANED),
        (["b/58"], Reason.BAD_VERSION),
        (["7"], Reason.BAD_VERSION),
    ],
)
def test_what_is_not_in_the_history_is_named(versions, reason):
    assert judge(PATH, versions, 100).reason is reason


def test_no_version_at_all_can_not_be_judged():
    with pytest.raises(BadBatch, match="has no version"):
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
