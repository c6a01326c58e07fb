"""I3 over a failover: with `redis_wait_replicas` the last event of an answer leaves when a replica has the turn, not before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from steno_proxy.store.redis.schema import trial_keys
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.stack import ROOT, Stack, running

SCRIPT = "def say(request):\n    return {'content': 'one two three'}\n"
TRIAL = "replicated"


@pytest.fixture
def pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    with contextlib.closing(RedisServer()) as primary, contextlib.closing(RedisServer()) as replica:
        replica.follow(primary.port)
        yield primary, replica


def ask(stack: Stack, stream: bool) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
    return httpx.post(f"{stack.base_url(TRIAL)}/chat/completions", json=body, timeout=120)


def turns(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.llen(trial_keys(TRIAL).turns))


def test_an_answer_ends_when_a_replica_has_it(pair: tuple[RedisServer, RedisServer], tmp_path: Path) -> None:
    primary, replica = pair
    (tmp_path / "script.py").write_text(SCRIPT)
    worker = ["--engine", "scripted", "--script", f"{tmp_path}/script.py:say"]
    worker += ["--model", str(ROOT / "steno/models/tiny")]
    waits = ["--redis-url", primary.url, "--redis-wait-replicas", "1", "--redis-wait-s", "5"]
    with running(tmp_path / "run", worker, proxy=waits) as stack:
        for number, stream in enumerate((True, False), start=1):
            assert ask(stack, stream).status_code == 200
            assert turns(replica) == number, "the answer is over, so it is there"
        replica.pause()
        with pytest.raises(httpx.RemoteProtocolError):  # the stream breaks before its end
            ask(stack, stream=True)
        assert ask(stack, stream=False).status_code == 503
        replica.resume()
        replica.until(lambda info: info["master_link_status"] == "up")
        answered = ask(stack, stream=True)
        assert answered.status_code == 200 and "[DONE]" in answered.text
        assert turns(replica) == turns(primary)
