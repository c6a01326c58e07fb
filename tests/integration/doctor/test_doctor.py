"""`steno doctor` against real processes: a sound deployment, and settings that break promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import RedisServer
from tests.support.stack import ROOT, Stack, free_port, running

SCRIPT = ROOT / "tests/integration/image/script.py"


def doctor(*args: str) -> tuple[int, dict[str, list[tuple[str, str, str]]]]:
    """Exit code, and by check (level, message, advice)."""
    done = subprocess.run(
        [sys.executable, "-m", "steno", "doctor", "--json", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
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
    code, found = doctor("--url", stack.url, "--redis-url", redis_server.url, "--folder", str(tmp_path))
    assert code == 0, found
    assert found["redis.persistence"][0][:2] == (
        "ok",
        "appendonly, appendfsync always: I3 holds over crashes and power cuts",
    )
    assert found["proxy.keys"][0][0] == "warning" and "STENO_ADMIN_KEY" in found["proxy.keys"][0][2]
    assert found["workers.connected"][0][:2] == ("ok", "1")
    sound = ("redis.version", "redis.eviction", "redis.clock", "proxy.clock", "proxy.store", "workers.versions")
    assert [found[check][0][0] for check in sound] == ["ok"] * len(sound), found
    assert "GiB free" in found["disk"][0][1]


@pytest.mark.parametrize(
    ("options", "check", "level", "said"),
    [
        (("--appendonly", "no"), "redis.persistence", "bad", "loses turns"),
        (("--appendfsync", "everysec"), "redis.persistence", "warning", "power cut loses up to 2 s"),
        (("--appendfsync", "no"), "redis.persistence", "bad", "kernel"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "redis.eviction", "bad", "drops records"),
        (("--maxmemory-policy", "allkeys-lru"), "redis.eviction", "warning", "harmless while maxmemory is 0"),
        (("--maxmemory", "1mb"), "redis.memory", "bad", "turns are refused"),
        (("--rename-command", "CONFIG", ""), "redis.settings", "warning", "forbidden"),
        (("--requirepass", "secret"), "redis.reachable", "bad", "refused us"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_settings_of_redis_that_break_a_promise(
    stack: Stack, options: tuple[str, ...], check: str, level: str, said: str
) -> None:
    port = free_port()
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync",
         "always", "--dir", str(stack.folder), *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        found = _answered(stack.url, f"redis://127.0.0.1:{port}/0")
    finally:
        process.terminate()
        process.wait(20)
    assert [finding[0] for finding in found[check]] == [level], found
    assert said in found[check][0][1]


def _answered(url: str, redis_url: str) -> dict[str, list[tuple[str, str, str]]]:
    for _ in range(20):
        _, found = doctor("--url", url, "--redis-url", redis_url)
        if "Connection refused" not in found["redis.reachable"][0][1]:
            return found
    raise AssertionError("redis-server did not come up")


def test_a_proxy_with_keys_and_without_workers(tmp_path: Path) -> None:
    keys = ["--admin-key", "the-admin-key-of-a-test", "--host", "127.0.0.1"]
    with running(tmp_path, None, proxy=keys) as stack:
        code, found = doctor("--url", stack.url)
        assert code == 1 and found["proxy.models"][0][0] == "bad"
        assert found["proxy.keys"][0][0] == "warning" and "workers.connected" not in found
        code, found = doctor("--url", stack.url, "--key", "wrong")
        assert found["proxy.keys"][0][0] == "bad"
        code, found = doctor("--url", stack.url, "--key", "the-admin-key-of-a-test")
        assert found["proxy.keys"][0][0] == "ok" and found["workers.connected"][0][0] == "bad"
        assert found["proxy.unrecorded_tokens"][0][0] == "ok" and code == 1


def test_nothing_there() -> None:
    code, found = doctor(
        "--url", f"http://127.0.0.1:{free_port()}", "--redis-url", f"redis://127.0.0.1:{free_port()}/0"
    )
    assert code == 1 and [found[check][0][0] for check in ("proxy.reachable", "redis.reachable")] == ["bad", "bad"]
