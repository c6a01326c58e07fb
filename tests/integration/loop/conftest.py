"""One product per test: each kills something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.loop.product import WORKER, Product, product


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Product]:
    with product(tmp_path, worker=(*WORKER, "--staging-dir", str(tmp_path / "staged"))) as running:
        yield running
