"""The cache of conversations' ends: right about what it holds, bounded, and never in the way of the store."""

from __future__ import annotations

from proxy.paths import Paths
from proxy.store.base import Path

REPLY = {"role": "assistant", "content": "x"}


def path(n_bytes: int) -> Path:
    return Path(bytes(n_bytes), REPLY)


def test_a_turn_takes_the_place_of_what_it_goes_on_from() -> None:
    paths = Paths()
    paths.put("t", 1.0, 0, path(40), -1)
    paths.put("t", 1.0, 1, path(80), 0)
    assert paths.get("t", 1.0, 0) is None
    assert paths.get("t", 1.0, 1) == path(80) and paths.held_bytes == 80


def test_the_least_recently_used_go_first() -> None:
    paths = Paths(max_bytes=400)
    for number in range(4):
        paths.put("t", 1.0, number, path(100), -1)
    paths.get("t", 1.0, 0)
    paths.put("t", 1.0, 4, path(100), -1)
    assert paths.get("t", 1.0, 0) is not None and paths.get("t", 1.0, 1) is None and paths.held_bytes == 400


def test_one_that_would_push_out_the_others_is_not_kept() -> None:
    paths = Paths(max_bytes=400)
    paths.put("t", 1.0, 0, path(101), -1)
    assert paths.get("t", 1.0, 0) is None and paths.held_bytes == 0


def test_a_trial_whose_name_is_in_use_again_finds_nothing_of_the_one_before() -> None:
    paths = Paths()
    paths.put("t", 1.0, 0, path(40), -1)
    assert paths.get("t", 2.0, 0) is None
