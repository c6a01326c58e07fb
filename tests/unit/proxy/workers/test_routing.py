"""Which worker a turn goes to."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import NoWorker, TooManyRequests
from steno.contracts.records import tokenizer_key
from steno.contracts.wire.frames import ModelCard
from steno_proxy.workers.routing import LOAD_FACTOR, SLACK_STREAMS, at_hand, choose, of_tokenizer, offers, score


@dataclass
class Candidate:
    id: str
    load: int = 0
    max_streams: int = 64


def fleet(count: int) -> list[Candidate]:
    return [Candidate(f"w{index}") for index in range(count)]


class Serving:
    def __init__(self, *models: ModelCard) -> None:
        self.models = list(models)


def test_a_name_means_the_card_that_has_it_and_any_other_the_default_policy() -> None:
    tiny, judge = ModelCard("tiny", 99), ModelCard("judge", 99, policy="frozen")
    both, one = Serving(judge, tiny), Serving(ModelCard("tiny", 99))
    assert offers([both, one], "judge") == [(both, judge)]
    assert offers([both, one], "gpt-5") == [(both, tiny), (one, one.models[0])]
    alone = Serving(judge)
    assert offers([alone], "gpt-5") == [(alone, judge)]
    assert offers([Serving()], "gpt-5") == []


def test_no_other_policy_is_meant_where_the_default_one_has_models_whose_workers_are_away() -> None:
    tiny, judge = ModelCard("tiny", 99), ModelCard("judge", 99, policy="frozen")
    other, both = Serving(judge), Serving(judge, tiny)
    for model in ("gpt-5", ""):
        assert offers([other], model, has_default=True) == []
        assert offers([other, both], model, has_default=True) == [(both, tiny)]
    assert offers([other], "judge", has_default=True) == [(other, judge)]


def test_ids_go_to_their_own_tokenizer_only_and_an_unknown_one_is_none_that_is_known() -> None:
    known, unknown = Serving(ModelCard("a", 99, tokenizer_digest="k")), Serving(ModelCard("a", 99))
    offered = offers([known, unknown], "a")
    assert of_tokenizer(offered, None) == offered
    assert [worker for worker, _ in of_tokenizer(offered, tokenizer_key("k"))] == [known]
    assert [worker for worker, _ in of_tokenizer(offered, b"")] == [unknown]
    assert of_tokenizer(offered, tokenizer_key("other")) == []


def test_no_worker_is_an_error_that_retrying_may_help() -> None:
    with pytest.raises(NoWorker):
        choose("t", [])


def test_a_trial_stays_where_it_was_and_only_a_lost_workers_trials_move() -> None:
    workers = fleet(5)
    before = {f"t{index}": choose(f"t{index}", workers).id for index in range(500)}
    after = {trial: choose(trial, workers[1:]).id for trial in before}
    assert all(after[trial] == worker for trial, worker in before.items() if worker != "w0")
    assert min(Counter(before.values()).values()) > 60


def test_every_replica_scores_alike() -> None:
    assert score("trial", "worker") == 0xCA7045A395D96807


def test_stickiness_yields_to_load_above_the_share() -> None:
    workers = fleet(4)
    sticky = choose("t", workers)
    sticky.load = SLACK_STREAMS - 1
    assert choose("t", workers) is sticky  # few streams are never uneven
    sticky.load = 40
    assert choose("t", workers) is not sticky
    for worker in workers:
        worker.load = 38
    assert choose("t", workers) is sticky  # all are loaded alike


def test_shares_follow_the_size_of_a_worker() -> None:
    small, large = Candidate("small", 0, 16), Candidate("large", 0, 160)
    for trial in range(110):
        choose(f"t{trial}", [small, large]).load += 1
    assert large.load > 4 * small.load


def test_a_full_worker_is_passed_over_then_a_few_are_at_hand_then_they_are_refused() -> None:
    workers = [Candidate("a", 16, 16), Candidate("b", 15, 16)]
    assert choose("t", workers).id == "b"
    workers[1].load = 17
    assert choose("t", workers).id == "a"
    workers[0].load = workers[1].load = 16 + at_hand(16)
    with pytest.raises(TooManyRequests):
        choose("t", workers)
    assert choose("t", workers, full_too=True)


FLEETS = st.sets(st.text("abcdefgh-0123456789", min_size=1, max_size=12), min_size=2, max_size=12)
TRIALS = [f"trial-{number}" for number in range(300)]


@given(FLEETS)
def test_a_worker_that_comes_takes_only_its_share_and_one_that_goes_gives_only_its_own(ids: set[str]) -> None:
    *others, one = (Candidate(name) for name in sorted(ids))
    without = {trial: choose(trial, others).id for trial in TRIALS}
    with_it = {trial: choose(trial, [*others, one]).id for trial in TRIALS}
    assert all(with_it[trial] in (without[trial], one.id) for trial in TRIALS)
    moved = sum(with_it[trial] != without[trial] for trial in TRIALS)
    fair = len(TRIALS) / len(ids)
    assert moved < fair + 6 * fair**0.5 + 1


@given(FLEETS, st.randoms(use_true_random=False), st.text(min_size=1))
def test_replicas_agree_whatever_order_their_workers_came_in(ids: set[str], dice: random.Random, trial: str) -> None:
    workers = [Candidate(name, dice.randrange(200), dice.choice([16, 64, 256])) for name in sorted(ids)]
    shuffled = list(workers)
    dice.shuffle(shuffled)
    assert choose(trial, workers, full_too=True) is choose(trial, shuffled, full_too=True)


@given(st.lists(st.sampled_from([8, 32, 64, 256]), min_size=2, max_size=8), st.integers(1, 400))
def test_loads_stay_bounded_however_trials_hash(sizes: list[int], turns: int) -> None:
    """Turns of one trial only, the worst case of stickiness: no worker goes beyond its share times the factor."""
    workers = [Candidate(f"w{index}", 0, size) for index, size in enumerate(sizes)]
    turns = min(turns, sum(sizes))
    for _ in range(turns):
        choose("one", workers).load += 1
    share = LOAD_FACTOR * turns / sum(sizes)
    assert all(worker.load <= max(SLACK_STREAMS, share * worker.max_streams + 1) for worker in workers)


@given(st.integers(2, 8))
def test_ties_do_not_pile_up(count: int) -> None:
    """Equal loads, also where all are full: trials spread over the workers."""
    for load in (0, 30, 64):
        workers = [Candidate(f"w{index}", load) for index in range(count)]
        chosen = Counter(choose(trial, workers).id for trial in TRIALS)
        assert max(chosen.values()) < 2.5 * len(TRIALS) / count and len(chosen) == count
