"""The worker's image as its users run it: it dials a proxy, a turn is recorded, SIGTERM ends it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.integration.image.test_image import ENV, buildah, check_health
from tests.support.programs.ports import free_port
from tests.support.programs.stack import running

pytestmark = pytest.mark.worker_image


def test_the_image_samples_with_the_demos_model_and_leaves_on_sigterm(tmp_path: Path) -> None:
    container = buildah("from", "--pull-never", os.environ["STENO_TEST_WORKER_IMAGE"])
    log, metrics = tmp_path / "container.log", free_port()
    try:
        config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
        assert config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM"
        with running(tmp_path, None) as stack, log.open("wb") as out:
            child = subprocess.Popen(
                ["buildah", "run", "--env", f"STENO_WORKER_PROXY=ws://127.0.0.1:{stack.port}",
                 "--env", f"STENO_WORKER_METRICS_PORT={metrics}",
                 "--env", "STENO_WORKER_MODEL=/opt/steno/lib/python3.11/site-packages/steno/models/tiny",
                 container, "--", *config["Entrypoint"], *config["Cmd"]],
                env=ENV, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            stack.workers.append(child)
            stack.wait_for_model()
            body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx.post(f"{stack.base_url('in-an-image')}/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            [turn] = stack.turns("in-an-image")
            assert len(turn["completion_ids"]) == answer.json()["usage"]["completion_tokens"] > 0
            assert "steno_worker_engine_up 1.0" in httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=30).text
            check_health(container, STENO_WORKER_METRICS_PORT=metrics)
            child.terminate()
            child.wait(120)
        assert "Traceback" not in log.read_text()
    finally:
        buildah("rm", container)
