"""docs/training.md names every reason, metric and mode there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_bridge.advantages import Estimator
from trainer_bridge.aggregation import Aggregation
from trainer_bridge.ledger import UNKNOWN_VERSION, Reason
from trainer_bridge.loss import MAXIMA, MEANS
from trainer_bridge.mismatch import Correction
from trainer_bridge.overlong import OverlongFiltering
from trainer_bridge.ratios import Level
from trainer_bridge.step import SCALARS

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text()


@pytest.mark.parametrize(
    "names",
    [Reason, MEANS + MAXIMA, SCALARS, Estimator, Aggregation, Correction, Level, OverlongFiltering, [UNKNOWN_VERSION]],
)
def test_every_name_that_a_user_meets_is_explained(names):
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_reason_has_its_row():
    rows = {line.split("`")[1] for line in PAGE.split("## The ledger")[1].splitlines() if line.startswith("| `")}
    assert rows == set(Reason)
