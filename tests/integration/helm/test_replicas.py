"""What the chart builds on: replicas share Redis and nothing else, any of them answers any trial, and workers dial
all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.helm.support import ROOT
from tests.support.programs.stack import Stack, running

pytestmark = pytest.mark.helm

SCRIPT = ROOT / "tests/integration/image/script.py"


def say(stack: Stack, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer = httpx.post(
        f"{stack.base_url('moving')}/chat/completions", json={"model": "m", "messages": messages}, timeout=30
    )
    assert answer.status_code == 200, answer.text + stack.logs()
    return dict(answer.json()["choices"][0]["message"])


def test_a_trial_goes_on_at_another_replica_though_one_that_workers_dial_is_not_there(
    redis_url: str, tmp_path: Path
) -> None:
    shared = ["--redis-url", redis_url]
    with (
        running(tmp_path / "first", None, proxy=shared) as first,
        running(tmp_path / "second", None, proxy=shared) as second,
    ):
        first.start_worker(
            "--proxy", f"ws://127.0.0.1:{second.port}", "--proxy", "ws://no-such-pod.invalid:8080",
            "--engine", "scripted", "--script", f"{SCRIPT}:reply",
        )  # fmt: skip
        first.wait_for_model()
        second.wait_for_model()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "One"}]
        messages += [say(first, messages), {"role": "user", "content": "Two"}]
        messages += [say(second, messages), {"role": "user", "content": "Three"}]
        say(first, messages)
        turns = second.turns("moving")
    # I2 across replicas: each turn continues the one before it, and none began anew.
    assert [turn["parent_id"] for turn in turns] == [None, turns[0]["turn_id"], turns[1]["turn_id"]]
    assert [turn["fork_reason"] for turn in turns] == [None, None, None]
