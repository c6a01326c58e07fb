"""`.ci/run` counts what passes only when it is tried again: here it runs a test that fails once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.sources import ROOT

ONCE = """
from pathlib import Path

def test_of_which_one_try_fails():
    failed = Path(__file__).with_name("failed")
    if not failed.exists():
        failed.touch()
        raise AssertionError("the first try")

def test_that_passes(): ...

def test_that_fails():
    assert not Path(__file__).with_name("always").exists()
"""


def twice(folder: Path) -> tuple[int, list[str]]:
    """The exit code, and the tests that passed only when they were tried again."""
    (folder / "test_once.py").write_text(ONCE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    noted = folder / "second-tries"
    command = [".ci/run", "twice", sys.executable, "-m", "pytest", "-q", "-p", "tests.support.plugins.second_tries"]
    found = subprocess.run(
        [*command, "-c", str(folder / "pytest.ini"), str(folder)],
        cwd=ROOT,
        env=os.environ | {"STENO_TEST_SECOND_TRIES": str(noted), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        check=False,
    )
    return found.returncode, noted.read_text().splitlines() if noted.exists() else []


def test_a_test_that_passes_only_when_it_is_tried_again_is_counted(tmp_path: Path) -> None:
    assert twice(tmp_path) == (0, ["test_once.py::test_of_which_one_try_fails"])
    [kept] = (tmp_path / "cache/steno/first-tries").iterdir()
    assert "AssertionError: the first try" in kept.read_text(), "so that somebody can mend it"


def test_what_passes_at_once_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "failed").touch()
    assert twice(tmp_path) == (0, [])


def test_what_fails_again_fails_the_section(tmp_path: Path) -> None:
    (tmp_path / "always").touch()
    code, noted = twice(tmp_path)
    assert (code, noted) == (1, ["test_once.py::test_of_which_one_try_fails"])
