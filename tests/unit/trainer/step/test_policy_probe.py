"""The ids of the trainer's probe stay what the policy would say (I10): drawn once, and anew when training moves away from them.

Seen on a GPU: over ten steps a correct engine's mean difference grew from 0.009 to 0.034 nats on the ids of the first weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from steno_trainer.errors import WeightsUnavailable
from steno_trainer.step import scoring
from steno_trainer.step.scoring import MOVED_NATS, PolicyProbe
from steno_trainer.weights.probe import ProbeTolerance


class Policy:
    """Says `says`, and finds each of its ids `at` likely. Stands in for ZeRO-3, which draws and scores."""

    def __init__(self) -> None:
        self.says, self.at, self.draws = [1, 2, 3], -0.5, 0

    def draw(self, _engine: Any, count: int) -> list[int]:
        self.draws += 1
        return self.says[:count]

    def score(self, _engine: Any, ids: Sequence[int]) -> list[float]:
        return [self.at if list(ids) == self.says else self.at - MOVED_NATS - 0.1] * (len(ids) - 1)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    policy = Policy()
    monkeypatch.setattr(scoring, "draw_tokens", policy.draw)
    monkeypatch.setattr(scoring, "score_tokens", policy.score)
    return policy


def _probe(policy: Policy) -> PolicyProbe:
    engine: Any = policy
    return PolicyProbe(engine, tokens=3, tolerance=ProbeTolerance.of("bfloat16"))


def test_ids_are_kept_while_the_policy_would_still_say_them(policy: Policy) -> None:
    probe = _probe(policy)
    for at in (-0.5, -0.1, -0.5 - 0.9 * MOVED_NATS):
        policy.at = at
        made = probe.make()
        assert made is not None and made.token_ids == [1, 2, 3] and made.logprobs == [at, at]
    assert policy.draws == 1


def test_ids_are_drawn_anew_once_the_policy_has_moved_away_from_them(policy: Policy) -> None:
    probe = _probe(policy)
    probe.make()
    policy.says = [1, 5, 6]
    made = probe.make()
    assert made is not None and made.token_ids == [1, 5, 6] and made.logprobs == [policy.at] * 2
    again = probe.make()
    assert again == made and policy.draws == 2


def test_how_far_it_moved_is_counted_from_the_newest_ids(policy: Policy) -> None:
    probe = _probe(policy)
    policy.at = -0.5
    probe.make()
    policy.at = -0.5 - 1.1 * MOVED_NATS
    probe.make()
    assert policy.draws == 2
    policy.at -= 0.9 * MOVED_NATS
    probe.make()
    assert policy.draws == 2


def test_weights_without_numbers_are_refused_and_draw_nothing(policy: Policy) -> None:
    probe = _probe(policy)
    probe.make()
    policy.at = math.nan
    with pytest.raises(WeightsUnavailable):
        probe.make()
    assert policy.draws == 1
