"""What a section of `.ci/run` collects: all tests that bear its mark, and no module is imported for the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.plugins.sections import SECTIONS, left_out, sections_of
from tests.support.sources import ROOT

SCRIPTS_TEST = (
    "not vllm and not agents and not image and not helm and not loop and not containers and not harbor"
    " and not worker_image and not viewer and not trl and not verl and not ray"
)
ANY_SECTION = re.compile(rf"mark\.({'|'.join(SECTIONS)})\b")


def test_a_sections_mark_stands_in_the_module_of_its_tests() -> None:
    """Where it is looked for: one in a conftest or a helper would be missed."""
    marked = 0
    for path in (ROOT / "tests").rglob("*.py"):
        found = set(ANY_SECTION.findall(path.read_text()))
        assert path.name.startswith("test_") or not found, (
            f"{path}: marks of sections outside of modules of tests: {found}"
        )
        marked += bool(found)
    assert marked > 30


def test_a_module_with_a_mark_at_a_single_test_is_not_left_out(tmp_path: Path) -> None:
    module = tmp_path / "test_module.py"
    for line in (f"@pytest.{'mark'}.agents\ndef test_it(): ...\n", f"pytestmark = [\n    pytest.{'mark'}.agents,\n]\n"):
        module.write_text("import pytest\n\n" + line)
        assert sections_of(module.read_text()) is None
        assert not any(left_out(module, expression) for expression in ("agents", "vllm", SCRIPTS_TEST))


def test_the_sections_are_the_marks_that_are_declared(pytestconfig: pytest.Config) -> None:
    declared = {str(line).partition(":")[0] for line in pytestconfig.getini("markers")}
    assert set(SECTIONS) <= declared
    for section in SECTIONS:
        assert re.search(rf"\bnot {section}\b", (ROOT / "scripts/test").read_text()), section
    assert SCRIPTS_TEST in (ROOT / "scripts/test").read_text()


@pytest.mark.parametrize(
    ("expression", "marks", "expected"),
    [
        ("vllm", "vllm", False),
        ("vllm", "vllm asyncio", False),
        ("vllm", "agents", True),
        ("image", "worker_image", True),
        ("vllm", "", True),
        ("vllm", "asyncio", True),
        ("vllm or agents", "agents", False),
        ("not (vllm or agents)", "agents", True),
        (SCRIPTS_TEST, "", False),
        (SCRIPTS_TEST, "asyncio", False),
        (SCRIPTS_TEST, "vllm asyncio", True),
        ("", "vllm", False),
        # Other marks may stand at single tests: nothing is told from the module's text.
        ("asyncio", "", False),
        ("vllm and asyncio", "", False),
        ("parametrize(a=1)", "", False),
    ],
)
def test_a_module_is_left_out_where_no_test_of_it_is_taken(
    tmp_path: Path, expression: str, marks: str, expected: bool
) -> None:
    module = tmp_path / "test_module.py"
    written = [f"pytest.mark.{mark}" for mark in marks.split()]
    module.write_text(f"import pytest\n\npytestmark = [{', '.join(written)}]\n" if written else "import pytest\n")
    assert left_out(module, expression) is expected


def test_what_is_no_module_of_tests_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("")
    assert not left_out(tmp_path / "conftest.py", "vllm")
    assert not left_out(tmp_path, "vllm")
