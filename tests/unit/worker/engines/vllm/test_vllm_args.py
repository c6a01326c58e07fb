"""Which arguments of vLLM's front-end are taken: those that do something here. Others are refused by vLLM's own parser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import steno_worker
from tests.unit.worker.engines.vllm.no_vllm import without_vllm

with without_vllm("steno_worker.engines.vllm.args") as args:
    FRONTEND = args.FRONTEND
FOLDER = Path(steno_worker.__file__).parent / "engines" / "vllm"


@pytest.mark.parametrize("name", FRONTEND)
def test_each_argument_that_is_taken_is_read(name: str) -> None:
    assert any(re.search(rf"args\.{name}\b|self\.{name}\b", path.read_text()) for path in FOLDER.glob("*.py"))
