"""`steno doctor` against real processes: a sound deployment, and settings that break promises."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno_cli.doctor.redis_promises import STALLED_S
from tests.support.machine.redis_server import START_TIMEOUT_S, RedisSentinel, RedisServer, memory
from tests.support.programs import forked
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT, Stack, running

SCRIPT = ROOT / "tests/integration/image/script.py"


def doctor(*args: str) -> tuple[int, dict[str, list[tuple[str, str, str]]]]:
    """Exit code, and by check (level, message, advice)."""
    done = forked.run([sys.executable, "-m", "steno", "doctor", "--json", *args])
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for finding in answer["findings"]:
        found.setdefault(finding["check"], []).append((finding["level"], finding["message"], finding["advice"]))
        assert finding["level"] == "ok" or finding["advice"], finding
    assert answer["healthy"] == (done.returncode == 0)
    return done.returncode, found


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def stack(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    worker = ["--engine", "scripted", "--script", f"{SCRIPT}:reply"]
    with running(tmp_path_factory.mktemp("doctor"), worker, proxy=["--redis-url", redis_server.url]) as found:
        yield found


def test_a_deployment_without_keys_on_loopback_is_told_so(
    stack: Stack, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.client().config_set("maxmemory-policy", "noeviction")
    code, found = doctor("--proxy", stack.url, "--redis-url", redis_server.url, "--folder", str(tmp_path))
    assert code == 0, found
    assert found["redis.restart"][0][:2] == (
        "ok",
        "a restart or a power cut loses no turn that an agent has received (appendfsync always)",
    )
    assert found["redis.failover"][0][0] == "ok" and "no replica" in found["redis.failover"][0][1]
    assert found["proxy.keys"][0][0] == "warning" and "STENO_ADMIN_KEY" in found["proxy.keys"][0][2]
    assert found["workers.connected"][0][:2] == ("ok", "1")
    sound = ("redis.version", "redis.eviction", "redis.clock", "proxy.clock", "proxy.store", "workers.versions")
    assert [found[check][0][0] for check in sound] == ["ok"] * len(sound), found
    assert "GiB free" in found["disk"][0][1]


@pytest.mark.parametrize(
    ("options", "check", "level", "said"),
    [
        (("--appendonly", "no"), "redis.restart", "bad", "a restart loses all data"),
        (("--appendfsync", "everysec"), "redis.restart", "warning", "a power cut up to 2 s"),
        (("--appendfsync", "no"), "redis.restart", "bad", "kernel"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "redis.eviction", "bad", "deletes records"),
        (("--maxmemory-policy", "allkeys-lru"), "redis.eviction", "warning", "harmless while maxmemory is 0"),
        (("--maxmemory", "1mb"), "redis.memory", "bad", "when memory is full, turns are refused"),
        (("--rename-command", "CONFIG", ""), "redis.settings", "warning", "Redis forbids CONFIG GET"),
        (("--requirepass", "secret"), "redis.reachable", "bad", "Redis refused the login"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_settings_of_redis_that_break_a_promise(
    stack: Stack, options: tuple[str, ...], check: str, level: str, said: str
) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="steno-redis-", dir=memory()) as folder:
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync",
             "always", "--dir", folder, *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            found = _answered(stack.url, f"redis://127.0.0.1:{port}/0")
        finally:
            process.terminate()
            process.wait(60)
    assert [finding[0] for finding in found[check]] == [level], found
    assert said in found[check][0][1]


def _answered(url: str, redis_url: str) -> dict[str, list[tuple[str, str, str]]]:
    limit = time.monotonic() + START_TIMEOUT_S
    while True:
        _, found = doctor("--proxy", url, "--redis-url", redis_url)
        said = found["redis.reachable"][0][1]
        if "Connection refused" not in said and "Timeout" not in said:
            return found
        assert time.monotonic() < limit, "redis-server did not come up"
        time.sleep(0.1)


@pytest.fixture
def followed() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica."""
    primary, replica = RedisServer(), RedisServer()
    try:
        primary.client().config_set("maxmemory-policy", "noeviction")
        replica.follow(primary.port)
        yield primary, replica
    finally:
        primary.close()
        replica.close()


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_failover_keeps_is_as_the_running_proxy_waits(
    followed: tuple[RedisServer, RedisServer], tmp_path: Path, waits: bool
) -> None:
    primary, replica = followed
    settings = ["--redis-url", primary.url, *(["--redis-wait-replicas", "1"] if waits else [])]
    with running(tmp_path, None, proxy=settings) as stack:
        _, found = doctor("--proxy", stack.url, "--redis-url", primary.url)
        [(level, message, _)] = found["redis.failover"]
        assert (level, "loses no turn" in message) == (("ok", True) if waits else ("warning", False)), message
        replica.pause()
        primary.until(lambda info: info["slave0"]["lag"] > STALLED_S)
        code, found = doctor("--proxy", stack.url, "--redis-url", primary.url)
        [(level, message, _)] = found["redis.failover"]
        assert code == 1 and level == "bad" and "stalled" in message
        assert ("writes get 503" if waits else "loses turns that agents have received") in message


def test_sentinels_are_asked_whether_they_could_fail_over(
    followed: tuple[RedisServer, RedisServer], stack: Stack
) -> None:
    primary, _ = followed
    sentinels = [RedisSentinel(primary.port, down_after_s=60) for _ in range(3)]
    try:
        for sentinel in sentinels:
            sentinel.knows("steno", others=2, replicas=1)
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        _, found = doctor("--proxy", stack.url, "--redis-url", f"{url}/steno")
        assert found["redis.sentinels"][0][:2] == ("ok", "3 Sentinels answer, and have the quorum for a failover")
        assert found["redis.reachable"][0][0] == "ok" and "redis.role" not in found
        sentinels[0].close()
        _, found = doctor("--proxy", stack.url, "--redis-url", f"{url}/steno")
        assert found["redis.sentinels"][0][0] == "warning" and str(sentinels[0].port) in found["redis.sentinels"][0][1]
        _, found = doctor("--proxy", stack.url, "--redis-url", f"{url}/another")
        assert found["redis.sentinels"][0][0] == "bad" and found["redis.reachable"][0][0] == "bad"
    finally:
        for sentinel in sentinels[1:]:
            sentinel.close()


def test_a_proxy_with_keys_and_without_workers(tmp_path: Path) -> None:
    keys = ["--admin-key", "the-admin-key-of-a-test", "--host", "127.0.0.1"]
    with running(tmp_path, None, proxy=keys) as stack:
        code, found = doctor("--proxy", stack.url)
        assert code == 1 and found["proxy.models"][0][0] == "bad"
        assert found["proxy.keys"][0][0] == "warning" and "workers.connected" not in found
        code, found = doctor("--proxy", stack.url, "--key", "wrong")
        assert found["proxy.keys"][0][0] == "bad"
        code, found = doctor("--proxy", stack.url, "--key", "the-admin-key-of-a-test")
        assert found["proxy.keys"][0][0] == "ok" and found["workers.connected"][0][0] == "bad"
        assert found["proxy.unrecorded_tokens"][0][0] == "ok" and code == 1


def test_nothing_there() -> None:
    code, found = doctor(
        "--proxy", f"http://127.0.0.1:{free_port()}", "--redis-url", f"redis://127.0.0.1:{free_port()}/0"
    )
    assert code == 1 and [found[check][0][0] for check in ("proxy.reachable", "redis.reachable")] == ["bad", "bad"]
