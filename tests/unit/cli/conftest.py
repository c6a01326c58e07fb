"""Commands that run in the tests' own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_logging_stays() -> Iterator[None]:
    """Remove the log handlers that a command has added. They write to the standard error that pytest captured for one test: for
    the next tests it is a closed file, and logging would print an error of its own."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [one for one in root.handlers if one not in before and type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)
