"""When a worker is suspect, and when no longer."""

from __future__ import annotations

from steno_proxy.workers.suspicion import FORGET_S, Suspicion


def test_several_bad_turns_of_several_trials_make_a_worker_suspect_once() -> None:
    suspicion = Suspicion()
    told = [suspicion.bad_turn(trial, f"nan {trial}", now) for now, trial in enumerate("aabc")]
    assert told == [False, False, True, False]
    assert suspicion.suspect(4) and suspicion.reason == "nan c"


def test_bad_turns_of_one_trial_may_be_its_prompts_doing() -> None:
    suspicion = Suspicion()
    assert not any(suspicion.bad_turn("a", "nan", 0.0) for _ in range(1000))
    assert suspicion.bad_turn("b", "nan", 1.0)


def test_bad_turns_are_forgotten_and_a_worker_may_be_suspect_again() -> None:
    suspicion = Suspicion()
    for now, trial in ((0.0, "a"), (1.0, "b"), (2.0, "a")):
        suspicion.bad_turn(trial, "nan", now)
    assert suspicion.suspect(FORGET_S - 0.1) and not suspicion.suspect(FORGET_S)
    assert suspicion.bad_turn("c", "nan", FORGET_S), "two of the three still count"


def test_what_was_cleared_counts_no_more() -> None:
    suspicion = Suspicion()
    assert not suspicion.clear()
    for trial in "abc":
        suspicion.bad_turn(trial, "nan", 0.0)
    assert suspicion.clear() and not suspicion.suspect(0.0)
    assert not suspicion.bad_turn("d", "nan", 1.0)
