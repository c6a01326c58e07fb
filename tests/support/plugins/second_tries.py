"""Notes which tests passed only when they were tried again: `.ci/run` counts them (docs/evidence/second-tries.md).

In the run that tries again, STENO_TEST_TRIED_AGAIN names a file; each test that passes in it is a line there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Not for the programs that tests start: some of them run pytest.
_FILE = os.environ.pop("STENO_TEST_TRIED_AGAIN", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With xdist this is called in the process that prints, which has the reports of all others."""
    if _FILE:
        note(_FILE, [report.nodeid for report in terminalreporter.stats.get("passed", [])])


def note(file: str, names: list[str]) -> None:
    with Path(file).open("a") as lines:
        lines.writelines(f"{name}\n" for name in names)
