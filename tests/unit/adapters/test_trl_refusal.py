"""Which rows TRL's trainer is not given, by what is trained of them. No TRL is needed."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.records import SampledRange, TokenSpan
from steno_adapters.rows import TrainableRow, trainable_rows
from tests.unit.adapters.test_rows import sample
from tests.unit.adapters.test_trl_parts import VersionCount, part

judged = part("row_refusal").judged


def row(first: SampledRange, context: str, trained: str) -> TrainableRow:
    """Two tokens of `first`, which `context` sampled, then two to be trained, which `trained` sampled."""
    spans = [TokenSpan(version=context, start=2, end=4), TokenSpan(version=trained, start=5, end=7)]
    [found], _ = trainable_rows([sample(completions=[first, SampledRange(start=5, end=7)], spans=spans)])
    return found


def of(found: TrainableRow) -> Any:
    """At step 3, after four pushes."""
    versions = VersionCount([("a", 0)])
    for step in range(4):
        versions.push(step)
    return judged(found, temperature=1.0, token_budget=0, max_staleness=2, model_version=4, versions=versions)


CONTEXT = SampledRange(start=2, end=4, policy="another")


@pytest.mark.parametrize(
    ("first", "context"),
    [
        (CONTEXT, "judge/7"),
        (CONTEXT, "a/0"),
        (SampledRange(start=2, end=4, shared=True), "a/0"),
        (SampledRange(start=2, end=4, superseded=True), "no version"),
    ],
)
def test_what_is_context_may_be_of_any_version(first: SampledRange, context: str) -> None:
    assert of(row(first, context, "a/3")) == (None, "", 4)


@pytest.mark.parametrize(
    ("trained", "reason", "number"), [("a/1", None, 2), ("a/0", "stale", 1), ("judge/3", "orphaned", None)]
)
def test_a_row_is_as_old_as_the_oldest_of_its_trained_tokens(
    trained: str, reason: str | None, number: int | None
) -> None:
    assert of(row(CONTEXT, "a/3", trained)) == (reason, "", number)
    both = row(SampledRange(start=2, end=4), "a/3", trained)
    assert both.trained_tokens == 4 and of(both) == (reason, "", number)
