"""Steps on their way to the proxy: in order, none waits for it, what is not taken is counted and warned of once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch

from steno.contracts.errors import Unreachable
from steno.contracts.records import bytes_to_halves
from steno.contracts.runs.training_steps import PostedAnnotation, TrainingStep
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.rows import TrainingTerms, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.reporting import step_posts
from steno_trainer.reporting.step_posts import MOST_WAITING, StepPosts, annotations_of
from tests.unit.trainer.recorded import VOCABULARY, Recording


class Taker:
    """A proxy that takes what comes while `there` is set, and refuses `refused` times before."""

    def __init__(self, refused: int = 0) -> None:
        self.refused, self.steps, self.parts = refused, list[int](), list[int]()
        self.there = asyncio.Event()
        self.there.set()

    async def post_step(self, run_id: str, step: TrainingStep) -> Any:
        await self.there.wait()
        if self.refused:
            self.refused -= 1
            raise Unreachable("nobody listens at http://proxy")
        self.steps.append(step.step)

    async def annotate(self, run_id: str, items: Any) -> Any:
        self.parts.append(len(items))


async def test_steps_arrive_in_order_and_failures_are_counted_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taker = Taker(refused=3)
    posts = StepPosts(taker, "r")
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            posts.post(TrainingStep(step=number))
        await posts.close(10.0)
    assert (taker.steps, posts.unposted) == ([3, 4, 5], 3)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "the proxy did not take the numbers of step 0"
    ]


async def test_while_the_proxy_is_away_only_the_newest_steps_wait() -> None:
    taker = Taker()
    taker.there.clear()
    posts = StepPosts(taker, "r")
    posts.post(TrainingStep(step=0))
    await asyncio.sleep(0)  # it is on its way
    for number in range(1, MOST_WAITING + 6):
        posts.post(TrainingStep(step=number))
    assert posts.unposted == 5
    taker.there.set()
    await posts.close(10.0)
    assert taker.steps == [0, *range(6, MOST_WAITING + 6)]


async def test_a_trainer_that_ends_does_not_wait_for_a_proxy_that_is_away() -> None:
    taker = Taker()
    taker.there.clear()
    posts = StepPosts(taker, "r")
    posts.post(TrainingStep(step=0))
    await asyncio.wait_for(posts.close(0.01), 10.0)
    assert taker.steps == []


def rows_of(recording: Recording) -> Any:
    history = VersionHistory((PolicyVersion("a", 1),))
    terms = TrainingTerms(history=history, max_staleness_steps=9, max_tokens=999, vocabulary=VOCABULARY)
    return read_samples(recording.samples(), terms, Ledger())


def test_each_turn_has_the_differences_of_its_own_tokens() -> None:
    recording = Recording()
    first = recording.turn(None, 3, 4)
    left = recording.turn(first, 2, 5, constrained=[(0, 2)])
    right = recording.turn(first, 1, 2)
    rows = rows_of(recording)
    trained = sum(row.trained_tokens for row in rows)
    assert (len(rows), trained) == (2, 4 + 3 + 2)
    found = annotations_of(rows, torch.arange(trained) / 8, {"g.0": 0.5}, step=2, version="a/2")
    seen = {each.turn_id: np.array(bytes_to_halves(each.differences)) for each in found}
    assert {(each.trial_id, each.step, each.version, each.advantage) for each in found} == {("g.0", 2, "a/2", 0.5)}
    assert len(found) == len(seen) == 3, "a turn that two samples share is said once"
    assert seen[first].tolist() == [0.0, 0.125, 0.25, 0.375]
    assert np.isnan(seen[left][:2]).all() and seen[left][2:].tolist() == [0.5, 0.625, 0.75]
    assert seen[right].tolist() == [0.875, 1.0]


async def test_annotations_are_posted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_posts, "TOKENS_AT_ONCE", 10)
    monkeypatch.setattr(step_posts, "TURNS_AT_ONCE", 3)
    tokens = [4, 4, 4, 30, 1, 1, 1, 1]
    items = [
        PostedAnnotation(trial_id="t", turn_id=str(at), step=1, differences=bytes(2 * n)) for at, n in enumerate(tokens)
    ]
    taker = Taker()
    posts = StepPosts(taker, "r")
    posts.post(TrainingStep(step=1), lambda: items)
    await posts.close(10.0)
    assert taker.parts == [2, 1, 1, 3, 1]
