"""Which modules of tests a section of `.ci/run` has no test in, told without importing them.

A section's mark mostly stands at the top of a module, in `pytestmark`, and holds for all its tests. A module with such a mark
anywhere else is never left out. A mark stands in the test's own module: tests/unit/house/test_sections.py asks that.
"""

from __future__ import annotations

import re
from pathlib import Path

SECTIONS = (
    "vllm",
    "helm",
    "image",
    "worker_image",
    "loop",
    "containers",
    "harbor",
    "agents",
    "viewer",
    "trl",
    "verl",
    "ray",
)
_WORDS = {"and", "or", "not"}
_PYTESTMARK = re.compile(r"^pytestmark = .*$", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


def sections_of(source: str) -> set[str] | None:
    """The sections that all tests of a module are in, by its text. None: single tests of it are marked."""
    if not set(SECTIONS).isdisjoint(_MARK.findall(_PYTESTMARK.sub("", source))):
        return None
    return {mark for line in _PYTESTMARK.findall(source) for mark in _MARK.findall(line)} & set(SECTIONS)


def left_out(path: Path, expression: str) -> bool:
    """Whether `-m expression` takes no test of the module at `path`; never where it has other names than those of sections."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    names = set(re.findall(r"[^\s()]+", expression)) - _WORDS
    if not names or not names <= set(SECTIONS):
        return False
    marks = sections_of(path.read_text())
    if marks is None:
        return False
    # pytest's grammar of `and`, `or`, `not` and parentheses is Python's, and all names are known.
    return not eval(expression, {"__builtins__": {}}, {section: section in marks for section in SECTIONS})
