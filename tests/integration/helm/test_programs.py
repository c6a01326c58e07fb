"""What the chart gives to its containers, given to the programs themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from steno_proxy.config.settings import ProxySettings
from steno_trainer.model.deepspeed_config import deepspeed_config
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings
from tests.integration.helm.support import CASES, ROOT, environment, only, pods, render
from tests.support.machine.redis_server import memory
from tests.support.programs.ports import free_port
from tests.support.programs.stack import running as running_stack

pytestmark = pytest.mark.helm

KEYS = {
    "admin-key": "ak-one",
    "worker-key": "wk-two",
    "trial-secret": "three",
    "metrics-key": "four",
    "viewer-key": "five",
}


def in_a_container(pod: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod's environment, with the keys that it mounts, the image's own variables and a Redis URL of ours."""
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    named = {item["name"] for item in pod["spec"]["containers"][0]["env"]}
    secret = {"STENO_REDIS_URL": "redis://redis:6379/0"} if "STENO_REDIS_URL" in named else {}
    for name, value in {"STENO_KEYS_DIR": str(folder), **secret, **environment(pod)}.items():
        monkeypatch.setenv(name, value.replace("/run/secrets/steno", str(folder)))
    for name, value in KEYS.items():
        (folder / name).write_text(value + "\n")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_proxy_takes_its_environment(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "recorder" if case.stem == "memory" else "run-steno"
    in_a_container(pods(render(case))[name], tmp_path, monkeypatch)
    settings = ProxySettings.load({}, None)
    settings.check()
    assert (settings.host, settings.port, settings.control_port) == ("0.0.0.0", 8080, 8081)
    assert settings.admin_key and settings.admin_key.get_secret_value() == "ak-one"
    assert settings.worker_key and settings.worker_key.get_secret_value() == "wk-two"
    shown = settings.viewer_key and settings.viewer_key.get_secret_value()
    assert shown == (None if case.stem == "external" else "five")
    assert (settings.otel_endpoint, settings.otel_content) == (
        ("http://collector.monitoring:4318", True) if case.stem == "traced" else (None, False)
    )
    if case.stem == "default":
        assert settings.public_url == "http://run-steno.training.svc:8080"
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


def test_a_trainer_takes_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render("training")
    config = tmp_path / "deepspeed.json"
    config.write_text(only(manifests, "ConfigMap", "run-steno-trainer")["data"]["deepspeed.json"])
    in_a_container(pods(manifests)["run-steno-trainer"], tmp_path, monkeypatch)
    settings = RunSettings.load({"deepspeed": str(config)}, None)
    settings.check()
    assert settings.key and settings.key.get_secret_value() == "ak-one"
    assert settings.proxy == "http://run-steno-control.training.svc:8081"
    assert (settings.run, settings.transport, settings.nccl_processes) == ("our-run", "nccl", 8)
    assert (settings.learning_rate, settings.betas, settings.activation_offload) == (2e-6, (0.9, 0.99), True)
    assert settings.checkpoint_dir == Path("/checkpoints/state") and settings.weights_dir == Path(
        "/checkpoints/weights"
    )
    made = deepspeed_config(settings, cuda=True)["zero_optimization"]
    assert made["reduce_bucket_size"] == 10**8 and made["stage"] == 3


@pytest.mark.parametrize(
    ("values", "sent"),
    [
        ((), (True, "filesystem", None)),
        (
            ("trainer.settings.offline=false", "trainer.settings.records=/models/samples.jsonl"),
            (True, "filesystem", None),
        ),
        (("trainer.settings.offline=false",), (False, "stream", "bfloat16")),
        (
            ("trainer.settings.offline=false", "trainer.settings.transport=filesystem"),
            (False, "filesystem", "bfloat16"),
        ),
    ],
    ids=["offline", "records", "online", "filesystem"],
)
def test_a_trainer_sends_weights_as_the_chart_says_unless_it_sends_none(
    values: tuple[str, ...], sent: tuple[bool, str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of what is sent is refused where nothing is."""
    manifests = render("offline", *(word for value in values for word in ("--set", value)))
    in_a_container(pods(manifests)["run-steno-trainer"], tmp_path, monkeypatch)
    settings = RunSettings.load({}, None)
    settings.check()
    assert (settings.is_offline, settings.transport, settings.send_dtype) == sent


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **env}, stdout=out, stderr=out, cwd=ROOT)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(60)
        finally:
            child.kill()


def until_it_succeeds(command: list[str], env: dict[str, str], child: subprocess.Popen[bytes], log: Path) -> str:
    """The output of a probe's command, asked again as the kubelet does."""
    deadline = time.monotonic() + 300
    while True:
        done = subprocess.run(command, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        assert child.poll() is None and time.monotonic() < deadline, log.read_text() + done.stderr
        time.sleep(0.2)


@pytest.fixture
def data() -> Iterator[str]:
    """Where a Redis keeps its files."""
    with tempfile.TemporaryDirectory(prefix="steno-redis-", dir=memory()) as folder:
        yield folder


def test_proxy_and_redis_start_as_the_chart_starts_them_and_helm_test_passes(tmp_path: Path, data: str) -> None:
    found = pods(render())
    redis_pod, proxy_pod, test_pod = (
        found[name]["spec"]["containers"][0] for name in ("run-steno-redis", "run-steno", "run-steno-test-ready")
    )
    redis_port, port, control = free_port(), free_port(), free_port()
    for name, value in KEYS.items():
        (tmp_path / name).write_text(value)

    words = [word.replace("/data", data) for word in redis_pod["args"]]
    probe = [*redis_pod["readinessProbe"]["exec"]["command"], "-p", str(redis_port)]
    probe.append(probe.pop(probe.index("ping")))
    password = {"REDISCLI_AUTH": "secretpassword"}
    env = {
        name: value.replace("/run/secrets/steno", str(tmp_path))
        .replace("$(REDIS_PASSWORD)", "secretpassword")
        .replace("run-steno-redis:6379", f"127.0.0.1:{redis_port}")
        for name, value in environment(found["run-steno"]).items()
    } | {
        "STENO_PORT": str(port), "STENO_CONTROL_PORT": str(control), "STENO_HOST": "127.0.0.1",
        "STENO_KEYS_DIR": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "steno", *proxy_pod["args"]]
    agents_url, control_url = (f"http://127.0.0.1:{found}" for found in (port, control))
    alive = [sys.executable, "-c", "import sys, urllib.request as u; u.urlopen(sys.argv[1])", agents_url]
    alive[-1] += proxy_pod["startupProbe"]["httpGet"]["path"]
    with running(command, env, tmp_path / "proxy.log") as proxy:
        until_it_succeeds(alive, {}, proxy, tmp_path / "proxy.log")
        ready = agents_url + proxy_pod["readinessProbe"]["httpGet"]["path"]
        assert httpx.get(ready, timeout=60).status_code == 503  # no Redis yet, and the kubelet leaves it running
        with running([*redis_pod["command"], *words, "--port", str(redis_port), "--bind", "127.0.0.1"], password,
                     tmp_path / "redis.log") as server:  # fmt: skip
            until_it_succeeds(probe, password, server, tmp_path / "redis.log")
            assert subprocess.run(probe, env={"PATH": os.environ["PATH"]}, capture_output=True).returncode != 0
            assert "secretpassword" not in " ".join(psutil.Process(server.pid).cmdline())
            with redis.Redis(port=redis_port, password="secretpassword") as client:
                kept = {
                    "appendonly": "yes",
                    "appendfsync": "always",
                    "maxmemory-policy": "noeviction",
                    "maxmemory": str(2**31),
                    "save": "",  # a snapshot that fails would refuse all writes
                }
                assert {name: client.config_get(name)[name] for name in kept} == kept

            test = [sys.executable, *test_pod["command"][1:], *test_pod["args"]]
            assert test[-2:] == ["http://run-steno:8080", "http://run-steno-control:8081"]
            test[-2:] = [agents_url, control_url]
            assert '"no worker"' in until_it_succeeds(test, {}, proxy, tmp_path / "proxy.log")
            swapped = subprocess.run([*test[:-2], control_url, agents_url], capture_output=True, text=True)
            assert swapped.returncode != 0 and "and not 404" in swapped.stderr
            bearer = {"authorization": "Bearer ak-one"}
            assert httpx.get(control_url + "/metrics", headers=bearer, timeout=60).status_code == 200
            answer = httpx.post(control_url + "/sessions/my-trial", headers=bearer, timeout=60)
            assert answer.json()["urls"]["openai"] == "http://run-steno.training.svc:8080/my-trial/v1"
            proxy.terminate()
            assert proxy.wait(60) == 0


def test_the_doctor_of_helm_test_finds_a_served_release_well(tmp_path: Path) -> None:
    doctor = pods(render("training"))["run-steno-test-ready"]["spec"]["containers"][1]
    (tmp_path / "admin-key").write_text("ak-one")
    script = ROOT / "tests/integration/image/script.py"
    with running_stack(tmp_path / "stack", None, proxy=["--admin-key", "ak-one"]) as stack:
        words = [word.replace("/run/secrets/steno", str(tmp_path)) for word in doctor["args"]]
        words[words.index("--proxy") + 1] = stack.url
        command = [sys.executable, "-m", "steno", *words]
        env = {"PATH": os.environ["PATH"], "COLUMNS": "200"}
        alone = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        assert alone.returncode == 1 and "no model can be served" in alone.stdout
        stack.start_worker("--key", "ak-one", "--engine", "scripted", "--script", f"{script}:reply")
        served = until_it_succeeds(command, env, stack.workers[0], stack.folder / "worker.log")
        assert "0 bad" in served
