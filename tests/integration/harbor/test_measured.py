"""The benchmark of rollouts measures Harbor's own driver, and containers of Docker's; how fast is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rollouts
from tests.integration.harbor.conftest import PYTHON

pytestmark = pytest.mark.harbor


@pytest.mark.parametrize("case", ["harbor_alone", "docker"])
def test_trials_are_measured(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its reward, or there is no figure. One trial is enough here."""
    monkeypatch.setattr(rollouts, "GROUP", 1)
    found = rollouts.measured([case], 0.05, {"harbor": PYTHON}, tmp_path)[case]
    assert found["trials"] == 1 and found["started_per_minute"] > 0 and found["launcher_cpu_ms_per_trial"] > 0
