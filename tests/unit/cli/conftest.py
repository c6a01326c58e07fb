"""Commands that run in the tests' own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_logging_stays() -> Iterator[None]:
    """Programs log to the standard error of their own process, which here is that of one test: to the next ones it is a closed
    file, and what they print begins with an error of logging's."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [one for one in root.handlers if one not in before and type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)
