"""Which data-parallel rank a turn goes to."""

from __future__ import annotations

from collections import Counter

from steno_worker.engines.vllm.ranks import SLACK_REQUESTS, CacheRanks


def test_a_trials_turns_go_to_one_rank_and_trials_spread() -> None:
    ranks = CacheRanks(4, 256)
    first = {}
    for number in range(400):
        first[number] = ranks.take(f"trial-{number}")
        ranks.release(first[number])
    for number in reversed(range(400)):
        again = ranks.take(f"trial-{number}")
        ranks.release(again)
        assert again == first[number]
    assert min(Counter(first.values()).values()) > 60 and set(first.values()) == {0, 1, 2, 3}


def test_a_rank_over_its_share_gives_turns_to_the_next_and_gets_them_back() -> None:
    ranks = CacheRanks(2, 256)
    taken = [ranks.take("one") for _ in range(SLACK_REQUESTS)]
    assert len(set(taken)) == 1, "a batch this small is never uneven"
    other = ranks.take("one")
    assert other == 1 - taken[0]
    for rank in (*taken, other):
        ranks.release(rank)
    assert ranks.take("one") == taken[0]


def test_many_requests_of_one_trial_are_even() -> None:
    ranks = CacheRanks(4, 256)
    taken = Counter(ranks.take("one") for _ in range(400))
    assert max(taken.values()) <= 1.25 * 401 / 4 and sum(taken.values()) == 400 and set(taken) == {0, 1, 2, 3}


def test_no_turn_waits_at_a_full_rank_while_another_has_a_seat() -> None:
    ranks = CacheRanks(4, 3)
    taken = Counter(ranks.take("one") for _ in range(12))
    assert set(taken.values()) == {3}
    more = Counter(ranks.take("one") for _ in range(4))
    assert set(more.values()) == {1}, "all are full: the least loaded"


def test_with_one_rank_or_without_a_trial_vllm_chooses() -> None:
    assert CacheRanks(1, 256).take("one") is None
    assert CacheRanks(2, 256).take("") is None
    CacheRanks(2, 256).release(None)
