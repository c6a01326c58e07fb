"""What an engine refuses of a request is no turn: it is a note on its session, whichever engine says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from steno.models import TINY
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running(folder, ["--engine", "transformers", "--model", str(TINY)]) as one:
        one.wait_for_model()
        yield one


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cold", {"temperature": 0.005}),
        ("ids", {"logit_bias": {"70000": 1.0}}),
        ("pattern", {"structured_outputs": {"regex": "(?<=a)b"}}),
    ],
)
def test_what_the_engine_refuses_is_no_turn_and_the_request_mended_is_the_first(
    stack: Stack, name: str, fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    url = stack.base_url(name) + "/chat/completions"
    assert httpx.post(url, json=body | fields, timeout=60).status_code == 400
    until(lambda: (stack.get(f"/sessions/{name}")["notes"] or {}).get("counts") == {"invalid_request": 1})
    assert stack.get(f"/sessions/{name}")["counts"]["turns"] == 0
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    (turn,) = stack.turns(name)
    assert turn["fork_reason"] is None and not turn["partial"]
