"""What stands at the end of a test run: the seconds of each folder, and the ten slowest tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT

PLUGIN = ("-p", "tests.support.plugins.seconds", "-p", "no:cacheprovider")
GIVEN = """
import pytest

SECONDS = {"a": 0.0, "quick": 0.2, "slow": 0.6}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.duration = SECONDS[item.path.parent.name] if report.when == "call" else 0.0
    return report
"""
"""Real durations would depend on the machine."""


def test_seconds_are_summed_by_the_folder_of_each_test_the_dearest_first(tmp_path: Path) -> None:
    for folder in ("a", "a/b/c/quick", "a/b/c/slow"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"test_{folder.replace('/', '_')}.py").write_text("def test_one(): ...\n")
    (tmp_path / "conftest.py").write_text(GIVEN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    said = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    summary = said.partition(" seconds per folder ")[2]
    lines = re.findall(r"^ +(\d+\.\d) (\S+|in all)$", summary, re.MULTILINE)
    assert lines == [("0.6", "a/b/c/slow"), ("0.2", "a/b/c/quick"), ("0.0", "a"), ("0.8", "in all")]


def test_each_run_names_the_ten_slowest_tests(pytestconfig: pytest.Config) -> None:
    assert "--durations=10" in pytestconfig.getini("addopts")
