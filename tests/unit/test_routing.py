"""Which worker a turn goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from proxy.contracts.errors import NoWorker, TooManyRequests
from proxy.contracts.frames import ModelCard
from proxy.contracts.records import tokenizer_key
from proxy.routing import SLACK_STREAMS, choose, of_tokenizer, offers, score


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


def test_ids_go_to_their_own_tokenizer_only_and_an_unknown_one_is_none_that_is_known() -> None:
    known, unknown = Serving(ModelCard("a", 99, tokenizer_digest="k")), Serving(ModelCard("a", 99))
    offered = offers([known, unknown], "a")
    assert of_tokenizer(offered, None) == offered
    assert [worker for worker, _ in of_tokenizer(offered, tokenizer_key("k"))] == [known]
    assert [worker for worker, _ in of_tokenizer(offered, b"")] == [unknown]
    assert of_tokenizer(offered, tokenizer_key("other")) == []


def test_no_worker_is_an_error_that_retrying_may_help() -> None:
    with pytest.raises(NoWorker):
        choose("t", [], 8)


def test_a_trial_stays_where_it_was_and_only_a_lost_workers_trials_move() -> None:
    workers = fleet(5)
    before = {f"t{index}": choose(f"t{index}", workers, 8).id for index in range(500)}
    after = {trial: choose(trial, workers[1:], 8).id for trial in before}
    assert all(after[trial] == worker for trial, worker in before.items() if worker != "w0")
    assert min(Counter(before.values()).values()) > 60


def test_every_replica_scores_alike() -> None:
    assert score("trial", "worker") == 0xCA7045A395D96807


def test_stickiness_yields_to_load_above_the_share() -> None:
    workers = fleet(4)
    sticky = choose("t", workers, 8)
    sticky.load = SLACK_STREAMS - 1
    assert choose("t", workers, 8) is sticky  # few streams are never uneven
    sticky.load = 40
    assert choose("t", workers, 8) is not sticky
    for worker in workers:
        worker.load = 38
    assert choose("t", workers, 8) is sticky  # all are loaded alike


def test_shares_follow_the_size_of_a_worker() -> None:
    small, large = Candidate("small", 0, 16), Candidate("large", 0, 160)
    for trial in range(110):
        choose(f"t{trial}", [small, large], 8).load += 1
    assert large.load > 4 * small.load


def test_a_full_worker_is_passed_over_then_turns_wait_then_they_are_refused() -> None:
    workers = [Candidate("a", 4, 4), Candidate("b", 3, 4)]
    assert choose("t", workers, 2).id == "b"
    workers[1].load = 5
    assert choose("t", workers, 2).id == "a"
    workers[0].load = workers[1].load = 6
    with pytest.raises(TooManyRequests):
        choose("t", workers, 2)
