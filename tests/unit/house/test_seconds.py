"""What stands at the end of a test run: the seconds of each folder, and the ten slowest tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT

PLUGIN = ("-p", "tests.support.plugins.seconds", "-p", "no:cacheprovider")


def test_seconds_are_summed_by_the_folder_of_each_test_the_dearest_first(tmp_path: Path) -> None:
    for folder, seconds in (("a", 0.0), ("a/b/c/quick", 0.2), ("a/b/c/slow", 0.6)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        module = tmp_path / folder / f"test_{folder.replace('/', '_')}.py"
        module.write_text(f"import time\n\ndef test_one():\n    time.sleep({seconds})\n")
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
    assert [name for _, name in lines] == ["a/b/c/slow", "a/b/c/quick", "a", "in all"]
    assert float(lines[0][0]) >= 0.6 > float(lines[2][0])


def test_each_run_names_the_ten_slowest_tests(pytestconfig: pytest.Config) -> None:
    assert "--durations=10" in pytestconfig.getini("addopts")
