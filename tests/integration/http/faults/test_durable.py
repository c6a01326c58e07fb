"""I3 against the real thing: the proxy as a process, a real Redis, and kill -9.

Right after the last event: the turn is in Redis. Before it: the agent saw no end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT
from tests.support.programs.stack import ROOT, running

SCRIPT = """
def say(request):
    text = request["messages"][-1]["content"]
    words = "one two three four five six " * (40 if text == "at length" else 1)
    return {"content": words.strip(), "pace_s": 0.0 if text == "x" else 0.05}
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    model = ["--model", str(ROOT / "steno/models/tiny")]
    return ["--engine", "scripted", "--script", f"{script}:say", *model, "--drain-s", "0.1"]


async def recorded(redis_url: str, trial_id: str) -> list[Any]:
    store = RedisStore(redis_url, **PATIENT)
    await store.open()
    try:
        return await store.turns(trial_id)
    finally:
        await store.close()


@pytest.mark.parametrize("stream", [True, False])
def test_killed_right_after_the_last_event_the_turn_is_in_redis(
    redis_url: str, worker: list[str], tmp_path: Path, stream: bool
) -> None:
    trial_id = f"after-{uuid.uuid4().hex}"
    with running(tmp_path / "run", worker, proxy=["--redis-url", redis_url]) as stack:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        with httpx.stream("POST", f"{stack.base_url(trial_id)}/chat/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if '"finish_reason":"' in line:
                    os.kill(stack.proxy.pid, signal.SIGKILL)
                    break
        stack.proxy.wait(60)
    [turn] = asyncio.run(recorded(redis_url, trial_id))
    assert (turn.finish_reason, turn.partial) == ("stop", False) and turn.completion_tokens > 3


def test_killed_before_the_last_event_the_agent_saw_no_end(redis_url: str, worker: list[str], tmp_path: Path) -> None:
    trial_id = f"before-{uuid.uuid4().hex}"
    seen: list[str] = []
    with running(tmp_path / "run", worker, proxy=["--redis-url", redis_url]) as stack:
        body = {"messages": [{"role": "user", "content": "at length"}], "stream": True}
        url = f"{stack.base_url(trial_id)}/chat/completions"
        with pytest.raises(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                seen.append(line)
                if len(seen) == 7:  # of many hundreds
                    os.kill(stack.proxy.pid, signal.SIGKILL)
        stack.proxy.wait(60)
    assert not any('"finish_reason":"' in line or "[DONE]" in line for line in seen)
    assert asyncio.run(recorded(redis_url, trial_id)) == []


def test_a_proxy_told_to_stop_finishes_its_streams(redis_url: str, worker: list[str], tmp_path: Path) -> None:
    trial_id = f"term-{uuid.uuid4().hex}"
    seen: list[str] = []
    with running(tmp_path / "run", worker, proxy=["--redis-url", redis_url]) as stack:
        body = {"messages": [{"role": "user", "content": "slowly"}], "stream": True}
        url = f"{stack.base_url(trial_id)}/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                seen.append(line)
                if len(seen) == 7:
                    stack.proxy.send_signal(signal.SIGTERM)
        assert stack.proxy.wait(60) == 0
    assert "data: [DONE]" in seen
    [turn] = asyncio.run(recorded(redis_url, trial_id))
    assert (turn.finish_reason, turn.partial) == ("stop", False)
