"""Whoever opens a folder takes in what is in it: at most fourteen modules of a kind, in the product and in its tests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.support.sources import ROOT, SOURCES

MOST = 14
NOT_COUNTED = ("__init__.py", "conftest.py")


def crowded(root: Path, tests: bool) -> list[str]:
    """Folders of `root` with more modules of a kind than that. Of tests there are two kinds: modules of tests, and helpers."""
    found = Counter(
        (path.parent, "tests" if tests and path.name.startswith("test_") else "helpers" if tests else "modules")
        for path in root.rglob("*.py")
        if path.name not in NOT_COUNTED
    )
    return [f"{folder}: {count} {kind}" for (folder, kind), count in sorted(found.items()) if count > MOST]


def test_no_folder_of_the_product_has_more_modules_than_one_takes_in() -> None:
    packages = [package for source in SOURCES.split(os.pathsep) for package in Path(source).glob("steno*/__init__.py")]
    assert len(packages) == 7
    assert [line for package in packages for line in crowded(package.parent, tests=False)] == []


def test_no_folder_of_tests_has_more_modules_of_tests_or_helpers_than_one_takes_in() -> None:
    assert crowded(ROOT / "tests", tests=True) == []


def test_modules_of_tests_and_helpers_are_counted_apart(tmp_path: Path) -> None:
    names = [*NOT_COUNTED, *(f"{kind}{number}.py" for kind in ("test_", "helper") for number in range(MOST))]
    for name in names:
        (tmp_path / name).touch()
    assert crowded(tmp_path, tests=True) == []
    (tmp_path / "test_more.py").touch()
    assert crowded(tmp_path, tests=True) == [f"{tmp_path}: {MOST + 1} tests"]
    assert crowded(tmp_path, tests=False) == [f"{tmp_path}: {2 * MOST + 1} modules"]
