"""The benchmark of rollouts measures trials on Ray; how fast is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollouts import measured
from tests.integration.rollouts.executors.test_ray import PYTHON

pytestmark = pytest.mark.ray


def test_trials_on_ray_are_measured(tmp_path: Path) -> None:
    """Each has its reward and two turns, or there is no figure."""
    found = measured(["ray"], 0.1, {"ray": PYTHON}, tmp_path)["ray"]
    assert found["trials"] == 4 and found["started_per_minute"] > 0 and found["launcher_cpu_ms_per_trial"] > 0
