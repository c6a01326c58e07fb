"""What the chart gives to its containers, given to the programs themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from inference_worker.config import WorkerSettings
from proxy.config import ProxySettings
from tests.integration.helm.support import CASES, ROOT, environment, pods, render
from tests.support.stack import free_port

pytestmark = pytest.mark.helm

KEYS = {"admin-key": "ak-one", "worker-key": "wk-two", "trial-secret": "three"}


def in_a_container(pod: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod's environment, with the keys that it mounts, the image's own variables and a Redis URL of ours."""
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    for name, value in {"STENO_KEYS_DIR": str(folder), **environment(pod)}.items():
        monkeypatch.setenv(name, value.replace("/run/secrets/steno", str(folder)))
    for name, value in KEYS.items():
        (folder / name).write_text(value + "\n")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_proxy_takes_its_environment(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "recorder" if case.stem == "memory" else "run-steno"
    in_a_container(pods(render(case))[name], tmp_path, monkeypatch)
    settings = ProxySettings.load({}, None)
    settings.check()
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert settings.admin_key and settings.admin_key.get_secret_value() == "ak-one"
    assert settings.worker_key and settings.worker_key.get_secret_value() == "wk-two"
    if case.stem == "external":
        assert settings.public_url == "https://steno.example/rl/steno"
        assert (settings.shutdown_s, settings.max_body_bytes, settings.keepalive_s) == (90.5, 2**28, 2.5)
        assert settings.retention_s == 31536000


def test_a_worker_takes_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_container(pods(render("whole"))["run-steno-worker"], tmp_path, monkeypatch)
    settings = WorkerSettings.load({}, None)
    assert settings.key and settings.key.get_secret_value() == "wk-two"
    assert (settings.engine, settings.model, settings.max_streams) == ("vllm", "/models/policy", 512)
    assert settings.engine_args == ["--tensor-parallel-size", "8", "--max-num-seqs", "512"]
    assert len(settings.proxy) == 4 and settings.metrics_port == 9100


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **env}, stdout=out, stderr=out, cwd=ROOT)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


def until_it_succeeds(command: list[str], env: dict[str, str], child: subprocess.Popen[bytes], log: Path) -> str:
    """The output of a probe's command, asked again as the kubelet does."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(command, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        assert child.poll() is None and time.monotonic() < deadline, log.read_text() + done.stderr
        time.sleep(0.2)


def test_proxy_and_redis_start_as_the_chart_starts_them_and_helm_test_passes(tmp_path: Path) -> None:
    found = pods(render())
    redis_pod, proxy_pod, test_pod = (
        found[name]["spec"]["containers"][0] for name in ("run-steno-redis", "run-steno", "run-steno-test-ready")
    )
    redis_port, port = free_port(), free_port()
    for name, value in KEYS.items():
        (tmp_path / name).write_text(value)

    words = [word.replace("$(REDISCLI_AUTH)", "pw").replace("/data", str(tmp_path)) for word in redis_pod["args"]]
    probe = [*redis_pod["readinessProbe"]["exec"]["command"], "-p", str(redis_port)]
    probe.append(probe.pop(probe.index("ping")))
    wait = found["run-steno"]["spec"]["initContainers"][0]
    assert wait["args"][1:] == ["run-steno-redis", "6379"]
    waiting = [sys.executable, *wait["command"][1:], wait["args"][0], "127.0.0.1", str(redis_port)]
    wait_log = tmp_path / "wait.log"
    with (
        running(waiting, {}, wait_log) as waiter,
        running([*redis_pod["command"], *words, "--port", str(redis_port), "--bind", "127.0.0.1"], {},
                tmp_path / "redis.log") as server,
    ):  # fmt: skip
        assert waiter.wait(30) == 0, wait_log.read_text()
        until_it_succeeds(probe, {"REDISCLI_AUTH": "pw"}, server, tmp_path / "redis.log")
        assert subprocess.run(probe, env={"PATH": os.environ["PATH"]}, capture_output=True).returncode != 0
        with redis.Redis(port=redis_port, password="pw") as client:
            kept = {
                "appendonly": "yes",
                "appendfsync": "always",
                "maxmemory-policy": "noeviction",
                "maxmemory": str(2**31),
            }
            assert {name: client.config_get(name)[name] for name in kept} == kept

        env = {
            name: value.replace("/run/secrets/steno", str(tmp_path))
            .replace("$(REDIS_PASSWORD)", "pw")
            .replace("run-steno-redis:6379", f"127.0.0.1:{redis_port}")
            for name, value in environment(found["run-steno"]).items()
        } | {"STENO_PORT": str(port), "STENO_HOST": "127.0.0.1", "STENO_KEYS_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "steno", *proxy_pod["args"]]
        with running(command, env, tmp_path / "proxy.log") as proxy:
            test = [sys.executable, *test_pod["command"][1:], *test_pod["args"]]
            assert test[-1] == "http://run-steno:8080/readyz"
            test[-1] = f"http://127.0.0.1:{port}{proxy_pod['readinessProbe']['httpGet']['path']}"
            assert '"no worker"' in until_it_succeeds(test, {}, proxy, tmp_path / "proxy.log")
            url = f"http://127.0.0.1:{port}"
            assert httpx.get(url + proxy_pod["livenessProbe"]["httpGet"]["path"]).status_code == 200
            assert httpx.get(url + "/metrics").status_code == 401
            bearer = {"authorization": "Bearer ak-one"}
            assert httpx.get(url + "/metrics", headers=bearer).status_code == 200
            assert httpx.post(url + "/sessions/my-trial", headers=bearer).status_code in (200, 201)
        assert proxy.returncode == 0
