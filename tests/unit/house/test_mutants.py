"""The mutants of product code still apply; what must notice them is run by command: `python -m tests.mutants`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.base import ROOT, Mutant, Stale


def test_each_mutant_applies_and_names_tests_that_there_are() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) > 60
    for mutant in MUTANTS:
        text = mutant.changed()
        if mutant.path.endswith(".py"):
            compile(text, mutant.path, "exec")
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file(), test


@pytest.mark.parametrize("text", ["a = 2\n", "a = 1\na = 1\n"])
def test_a_mutant_of_code_that_is_gone_or_there_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(Stale, match="of-a"):
        Mutant("of-a", "", "a.py", "a = 1\n", "a = 0\n", ()).changed(tmp_path)
