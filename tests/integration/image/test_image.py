"""The proxy's image, built by scripts/image, run as its users run it: an agent's turn is recorded through it.

`STENO_TEST_IMAGE` names the image; buildah runs it here in a chroot, with the machine's network and the image's own user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until_it_answers
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.image

ENV = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
SCRIPT = ROOT / "tests/integration/image/script.py"


def buildah(*args: str) -> str:
    return subprocess.run(["buildah", *args], env=ENV, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def started(
    container: str, log: Path, port: int, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`docker run`: the image's own command."""
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    given = [f"--env={name}={value}" for name, value in {**(environment or {}), "STENO_PORT": port}.items()]
    command = ["buildah", "run", *given, container, "--", *config["Entrypoint"], *config["Cmd"]]
    with process(command, log, ENV) as child:
        until_it_answers(
            child, log, lambda: httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
        )
        yield child


def check_health(container: str, **environment: object) -> None:
    """The image's own health check, beside what it checks."""
    kind, *command = json.loads(buildah("inspect", container))["Docker"]["config"]["Healthcheck"]["Test"]
    assert kind == "CMD"
    buildah("run", *(f"--env={name}={value}" for name, value in environment.items()), container, "--", *command)


@pytest.fixture
def container() -> Iterator[str]:
    name = buildah("from", "--pull-never", os.environ["STENO_TEST_IMAGE"])
    yield name
    buildah("rm", name)


def keys_in(log: str) -> dict[str, str]:
    return dict(re.findall(r"^\s+(admin|worker) key\s+(\S+)", log, re.MULTILINE))


def test_the_image_makes_its_keys_once_and_records_an_agents_turn(container: str, tmp_path: Path) -> None:
    log, port = tmp_path / "proxy.log", free_port()
    url = f"http://127.0.0.1:{port}"
    with started(container, log, port):
        keys = keys_in(log.read_text())
        assert set(keys) == {"admin", "worker"}
        check_health(container, STENO_PORT=port)
        assert httpx.get(f"{url}/sessions", timeout=60).status_code == 401
        with (tmp_path / "worker.log").open("wb") as out:
            worker = subprocess.Popen(
                [sys.executable, "-m", "steno", "worker", "--proxy", f"ws://127.0.0.1:{port}", "--engine", "scripted",
                 "--script", f"{SCRIPT}:reply"],
                cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "STENO_WORKER_KEY": keys["worker"]},
            )  # fmt: skip
        try:
            admin = httpx.Client(base_url=url, headers={"authorization": f"Bearer {keys['admin']}"}, timeout=30)
            trial = admin.post("/sessions/in-a-container").raise_for_status().json()
            agent = httpx.Client(base_url=url, headers={"authorization": f"Bearer {trial['api_key']}"}, timeout=30)
            answer = _when_served(agent, worker)
            assert answer["choices"][0]["message"]["content"] == "Recorded."
            turns = admin.get("/sessions/in-a-container/turns").json()["items"]
            assert [turn["reply"]["content"] for turn in turns] == ["Recorded."]
            assert len(turns[0]["completion_ids"]) == answer["usage"]["completion_tokens"]
            assert agent.get("/sessions/in-a-container").status_code == 403
        finally:
            worker.terminate()
            worker.wait(120)
    again = tmp_path / "again.log"
    with started(container, again, port):
        assert keys_in(again.read_text()) == {}, "keys are shown once"
        assert httpx.get(f"{url}/sessions", headers={"x-api-key": keys["admin"]}, timeout=60).status_code == 200


def _when_served(agent: httpx.Client, worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
    until = time.monotonic() + 180
    while True:
        answer = agent.post("/in-a-container/v1/chat/completions", json=body)
        if answer.status_code == 200:
            return dict(answer.json())
        assert answer.status_code == 503 and worker.poll() is None and time.monotonic() < until, answer.text
        time.sleep(0.2)


def test_the_image_is_small_and_runs_as_nobody_in_particular(container: str) -> None:
    config = json.loads(buildah("inspect", container))
    assert config["OCIv1"]["config"]["User"] == "10001:10001"
    with pytest.raises(subprocess.CalledProcessError):
        check_health(container, STENO_PORT=free_port())
    listed = buildah(
        "run", container, "--", "python3", "-c", "import os; print(os.getuid(), os.access('/opt/steno', os.W_OK))"
    )
    assert listed == "10001 False"
    installed = buildah("run", container, "--", "ls", "/opt/steno/lib/python3.11/site-packages").split()
    assert not {"torch", "transformers", "tokenizers", "pip", "setuptools", "litellm"} & set(installed)
    buildah("run", container, "--", "python3", "-c", "import steno_proxy.tracing.otlp")  # what sends traces is there
