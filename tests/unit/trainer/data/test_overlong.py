"""What was cut is left out of the loss if that is asked for, length costs what DAPO says it does, and the books balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steno.contracts.records import Group, Sample, SampledRange, Session
from steno.contracts.runs.leases import Lease
from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.lease_feed import LeasedGroup
from steno_trainer.data.ledger import Ledger, Reason
from steno_trainer.data.overlong import Overlong, OverlongFiltering
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.step.assemble import AssembledStep, assemble
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

TERMS = TrainingTerms(
    VersionHistory((PolicyVersion("a", 9),)), max_staleness_steps=9, max_tokens=400, vocabulary=VOCABULARY
)
OFF, COMPLETION, TRIAL = OverlongFiltering


def leased(*trials: tuple[Session, Recording]) -> LeasedGroup:
    books, tokens = Ledger(), {}
    for trial, recording in trials:
        tokens[trial.trial_id] = {"a/1": sum(turn.completion_tokens for turn in recording.turns)}
        books.sampled("a/1", tokens[trial.trial_id]["a/1"])
    group = Group(group_id="g", size=len(trials), created_at=0.0)
    lease = Lease(lease_id="l", group=group, trials=[t for t, _ in trials], tokens=tokens, expires_at=1e12)
    return LeasedGroup(lease, [sample for trial, recording in trials for sample in recording.samples(trial)], books)


def spoken(*turns: tuple[int, dict[str, Any]]) -> Recording:
    """One path; (sampled tokens, fields) of each turn."""
    recording, parent = Recording(len(turns)), None
    for sampled, fields in turns:
        parent = recording.turn(parent, 2, sampled, **fields)
    return recording


def plain(n: int, *, tokens: int = 4) -> tuple[Session, Recording]:
    return session(f"g.{n}", reward=float(n)), spoken((tokens, {}))


CUT = {"finish_reason": "length"}
BROKEN = {"finish_reason": "cancelled", "partial": True}


def assembled(overlong: Overlong, *trials: tuple[Session, Recording], terms: TrainingTerms = TERMS) -> AssembledStep:
    """Balanced, with what the rows hold booked as trained."""
    found = assemble([leased(*trials)], terms, Estimator.GRPO, overlong)
    books = Ledger()
    books.add(found.books)
    for row in found.batch.rows:
        for version, tokens in row.trained_by_version().items():
            books.trained(version, tokens)
    books.check()
    return found


def trained(found: AssembledStep) -> dict[str, int]:
    return {row.trial_id: row.trained_tokens for row in found.batch.rows}


def untrained(found: AssembledStep) -> dict[Reason, int]:
    return found.books.total().untrained


@pytest.mark.parametrize("ending", [CUT, BROKEN], ids=["at its limit", "partial"])
def test_without_being_asked_nothing_is_left_out(ending: dict[str, Any]) -> None:
    trials = plain(0), (session("g.1", reward=1.0, end_reason="limit:max_turns"), spoken((3, {}), (5, ending)))
    found = assembled(Overlong(), *trials)
    assert trained(found) == {"g.0": 4, "g.1": 8}
    assert untrained(found) == {}
    rewards = [ScoredTrial("g.0", "g", 0.0), ScoredTrial("g.1", "g", 1.0)]
    assert found.batch.advantages == group_advantages(rewards, Estimator.GRPO).by_trial
    assert found.values["length/truncated_fraction"] == pytest.approx(1 / 3)
    assert not [name for name in found.values if name.startswith("overlong/")]


@pytest.mark.parametrize("ending", [CUT, BROKEN], ids=["at its limit", "partial"])
def test_a_completion_that_was_cut_is_left_out_and_what_came_before_is_trained(ending: dict[str, Any]) -> None:
    found = assembled(Overlong(COMPLETION), plain(0), (session("g.1", reward=1.0), spoken((3, {}), (5, ending))))
    assert trained(found) == {"g.0": 4, "g.1": 3}
    assert untrained(found) == {Reason.OVERLONG: 5}
    assert found.values["overlong/masked_fraction"] == pytest.approx(5 / 12)
    assert found.batch.advantages["g.1"] == -found.batch.advantages["g.0"] > 0, "its reward counts all the same"


def test_what_is_left_out_is_context_of_what_was_sampled_after_it() -> None:
    found = assembled(Overlong(COMPLETION), plain(0), (session("g.1", reward=1.0), spoken((3, CUT), (5, {}))))
    [row] = [row for row in found.batch.rows if row.trial_id == "g.1"]
    assert row.tokens == 2 + 3 + 2 + 5
    assert row.loss_mask_T.nonzero()[:, 0].tolist() == [7, 8, 9, 10, 11]


def test_a_shared_completion_that_was_cut_is_booked_once() -> None:
    forked = Recording()
    root = forked.turn(None, 2, 6, **CUT)
    forked.turn(root, 1, 3)
    forked.turn(root, 2, 2)
    found = assembled(Overlong(COMPLETION), plain(0), (session("g.1", reward=1.0), forked))
    assert untrained(found) == {Reason.OVERLONG: 6}
    assert sorted(row.trained_tokens for row in found.batch.rows) == [2, 3, 4]
    assert found.values["length/truncated_fraction"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("fields", "turns", "left"),
    [
        ({"end_reason": "limit:max_turns"}, [(3, {}), (5, {})], 0),
        ({"end_reason": "completed"}, [(3, {}), (5, CUT)], 0),
        ({"end_reason": "completed"}, [(3, CUT), (5, {})], 5),
        ({"end_reason": "completed"}, [(3, {}), (5, BROKEN)], 3),
        ({"end_reason": "completed"}, [(3, {}), (5, {})], 8),
        ({}, [(3, {}), (5, {"policy": "judge", **CUT})], 3),
    ],
    ids=["its own limit", "ends at a limit", "went on from one", "broke", "whole", "another policy's end"],
)
def test_a_trial_that_was_cut_is_left_out_whole(
    fields: dict[str, Any], turns: list[tuple[int, dict[str, Any]]], left: int
) -> None:
    found = assembled(Overlong(TRIAL), plain(0), (session("g.1", reward=1.0, **fields), spoken(*turns)))
    assert trained(found) == {"g.0": 4} | ({"g.1": left} if left else {})
    assert set(found.batch.advantages) == {"g.0", "g.1"}


def test_lengths_are_those_of_the_calls_that_are_trained() -> None:
    main, other = {"model": "main"}, {"model": "explorer", **CUT}
    trials = [(session(f"g.{n}", reward=float(n)), spoken((4 + n, main), (90, other))) for n in range(2)]
    overlong = Overlong(TRIAL, max_tokens=10, buffer_tokens=5)
    found = assembled(overlong, *trials, terms=replace(TERMS, models=("main",)))
    assert trained(found) == {"g.0": 4, "g.1": 5}, "a path that ends in another's cut is whole"
    assert untrained(found) == {Reason.OTHER_MODEL: 180} and found.other_models == ()
    none = assembled(overlong, *trials, terms=replace(TERMS, models=("sub",)))
    assert none.other_models == ("explorer", "main")
    assert (found.values["overlong/penalty"], found.values["length/truncated_fraction"]) == (0.0, 0.0)


def test_a_reason_of_the_record_goes_before_this_one() -> None:
    recording = spoken((6, {"constrained": [(0, 2)], **CUT}))
    found = assembled(Overlong(TRIAL), plain(0), (session("g.1", reward=1.0), recording))
    assert untrained(found) == {Reason.CONSTRAINED: 2, Reason.OVERLONG: 4}


def test_samples_of_an_older_proxy_say_nothing_and_are_read() -> None:
    [sample] = spoken((4, CUT)).samples(session("g.1"))
    older = sample.model_dump()
    for part in older["completions"]:
        del part["finish_reason"], part["partial"], part["model"]
    read = Sample.model_validate(older)
    assert read.completions == [SampledRange(start=2, end=6)]
    left_out = Overlong(TRIAL).left_out([], [read], lambda part: True)
    assert not left_out(read, read.completions[0])


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (85, -0.5), (90, -1.0), (91, -1.0), (500, -1.0)]
)
def test_the_punishment_is_equation_13_of_dapo(tokens: int, expected: float) -> None:
    """L_max = 90, L_cache = 10, as the paper writes it, in three cases."""
    maximum, cache = 90, 10
    if tokens <= maximum - cache:
        paper = 0.0
    elif tokens <= maximum:
        paper = ((maximum - cache) - tokens) / cache
    else:
        paper = -1.0
    assert paper == pytest.approx(expected)
    assert Overlong(max_tokens=maximum, buffer_tokens=cache).shaping(tokens) == pytest.approx(paper)
    assert Overlong(max_tokens=maximum, buffer_tokens=cache, penalty_factor=0.5).shaping(tokens) == 0.5 * paper
    assert Overlong().shaping(tokens) == 0.0


def test_the_punishment_is_of_all_that_a_trial_sampled_once_and_shapes_its_advantage() -> None:
    forked = Recording()
    root = forked.turn(None, 2, 6)
    forked.turn(root, 1, 3)
    forked.turn(root, 2, 2)
    forked.turn(root, 2, 50, superseded_by="f" * 12)
    long = session("g.2", reward=1.0)
    group = leased(plain(0), plain(1), (long, forked))
    group.books.untrained("a/1", Reason.SUPERSEDED, 50)  # as the feed books them: no sample holds them
    found = assemble([group], TERMS, Estimator.GRPO_NO_STD, Overlong(max_tokens=16, buffer_tokens=10))
    assert found.values["overlong/penalty"] == pytest.approx(0.5 / 3)
    assert found.values["reward/mean"] == pytest.approx(2 / 3), "what the task gave"
    mean = (0.0 + 1.0 + 0.5) / 3
    assert found.batch.advantages == pytest.approx({"g.0": -mean, "g.1": 1 - mean, "g.2": 0.5 - mean})
    assert trained(found)["g.2"] > 0 and not untrained(found).keys() - {Reason.SUPERSEDED}


def test_length_alone_makes_no_group_say_something() -> None:
    alike = plain(0, tokens=4), (session("g.1", reward=0.0), spoken((40, {})))
    found = assembled(Overlong(max_tokens=30, buffer_tokens=10), *alike)
    assert found.batch.rows == [] and untrained(found) == {Reason.ZERO_VARIANCE: 44}


def test_rewards_that_punishment_makes_equal_have_advantages_of_nothing() -> None:
    found = assembled(
        Overlong(max_tokens=30, buffer_tokens=10), plain(0), (session("g.1", reward=1.0), spoken((40, {})))
    )
    assert found.batch.advantages == {"g.0": 0.0, "g.1": 0.0}
