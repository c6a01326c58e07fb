"""Where the time of a test run goes: the seconds of each folder of tests, the dearest first."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import pytest

_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Set-up and tear-down of a test count, too. With xdist the reports of all processes come to the one that prints."""
    _seconds[str(PurePosixPath(report.nodeid.partition("::")[0]).parent)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds per folder")
    for folder, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{seconds:8.1f} {folder}")
    terminalreporter.write_line(f"{_seconds.total():8.1f} in all")
