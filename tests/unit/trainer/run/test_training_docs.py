"""The training pages name every reason, metric and mode there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno_trainer.data.advantages import Estimator
from steno_trainer.data.ledger import UNKNOWN_VERSION, Reason
from steno_trainer.data.overlong import OverlongFiltering
from steno_trainer.objective.aggregation import Aggregation
from steno_trainer.objective.loss import MAXIMA, MEANS
from steno_trainer.objective.mismatch import Correction, CorrectionLevel
from steno_trainer.objective.ratios import RatioLevel
from steno_trainer.objective.registry import REGISTRY
from steno_trainer.step.step import SCALARS

DOCS = Path(__file__).parents[4] / "docs"
TRAINING = (DOCS / "training.md").read_text()
PAGES = TRAINING + (DOCS / "objective.md").read_text()


@pytest.mark.parametrize(
    "names",
    [
        Reason,
        MEANS + MAXIMA,
        SCALARS,
        Estimator,
        Aggregation,
        Correction,
        CorrectionLevel,
        RatioLevel,
        REGISTRY,
        OverlongFiltering,
        [UNKNOWN_VERSION],
    ],
)
def test_every_name_that_a_user_meets_is_explained(names):
    assert [name for name in names if f"`{name}`" not in PAGES] == []


def test_every_reason_has_its_row():
    rows = {line.split("`")[1] for line in TRAINING.split("## The ledger")[1].splitlines() if line.startswith("| `")}
    assert rows == set(Reason)
