from __future__ import annotations

import pytest

from steno.contracts.records import Counts, Limits
from steno_proxy.sessions.limits import spent, timed_out, tokens_left, wall_left_s, without_room
from tests.unit.proxy.sessions.agent import session

SPENDING = session().model_copy(
    update={"counts": Counts(turns=3, completion_tokens=100), "first_turn_at": 10.0, "updated_at": 50.0}
)


@pytest.mark.parametrize(
    ("limits", "now", "name"),
    [
        ({}, 1e9, None),
        ({"max_turns": 3}, 60.0, "max_turns"),
        ({"max_turns": 4}, 60.0, None),
        ({"max_tokens": 100}, 60.0, "max_tokens"),
        ({"max_tokens": 101}, 60.0, None),
        ({"max_wall_s": 50.0}, 60.0, "max_wall_s"),
        ({"max_wall_s": 51.0}, 60.0, None),
        ({"max_idle_s": 10.0}, 60.0, "max_idle_s"),
        ({"max_idle_s": 11.0}, 60.0, None),
        ({"max_turns": 1, "max_tokens": 1}, 60.0, "max_turns"),
    ],
)
def test_a_limit_is_spent_when_it_is_reached(limits, now, name):
    assert spent(Limits(**limits), SPENDING, now) == name


def test_wall_time_starts_with_the_first_turn():
    assert spent(Limits(max_wall_s=1.0), session(), 1e9) is None


def test_tokens_left_is_what_the_next_turn_may_sample():
    assert tokens_left(Limits(max_tokens=130), SPENDING) == 30
    assert tokens_left(Limits(max_tokens=70), SPENDING) == 0
    assert tokens_left(Limits(), SPENDING) is None


def test_tokens_left_are_shared_by_choices():
    assert [tokens_left(Limits(max_tokens=107), SPENDING, n) for n in (1, 2, 8)] == [7, 3, 0]


def test_a_session_with_a_turn_running_is_not_idle_and_one_without_a_first_turn_neither():
    limits = Limits(max_idle_s=1.0)
    assert spent(limits, SPENDING, 60.0, busy=True) is None
    assert timed_out(limits, session(), 1e9) is None


@pytest.mark.parametrize(
    ("limits", "n", "running", "name"),
    [
        ({"max_turns": 5}, 2, 0, None),
        ({"max_turns": 5}, 2, 1, "max_turns"),
        ({"max_turns": 5}, 3, 0, "max_turns"),
        ({"max_tokens": 102}, 2, 9, None),
        ({"max_tokens": 102}, 3, 0, "max_tokens"),
    ],
)
def test_what_is_asked_for_must_fit_beside_what_runs(limits, n, running, name):
    assert without_room(Limits(**limits), SPENDING, n, recorded=3, running=running) == name


def test_wall_time_left_begins_with_the_first_turn():
    limits = Limits(max_wall_s=50.0)
    assert [wall_left_s(limits, SPENDING, now) for now in (20.0, 70.0)] == [40.0, 0.0]
    assert wall_left_s(limits, session(), 1e9) == 50.0
    assert wall_left_s(Limits(), SPENDING, 20.0) is None
