"""No key is ever shown: not by the settings, not in the documents, not in errors, not where a crash would print it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import httpx
import pytest

from steno_proxy.config.settings import ProxySettings
from tests.integration.http.conftest import running
from tests.support.programs.stack import ROOT

SECRETS = {
    "admin_key": "ak-Xq1-secret", "worker_key": "wk-Xq2-secret", "trial_secret": "ts-Xq3-secret",
    "metrics_key": "mk-Xq5-secret",
}  # fmt: skip


async def test_prometheus_key_reads_metrics_and_nothing_else() -> None:
    async with running(admin_key="admin", metrics_key="metrics") as proxy:
        key = {"authorization": "Bearer metrics"}
        assert "steno_proxy_workers" in (await proxy.http.get("/metrics", headers=key)).text
        for path in ("/sessions", "/workers", "/policy", "/runs/r", "/groups/g", "/t/v1/models"):
            assert (await proxy.http.get(path, headers=key)).status_code == 403, path
        assert (await proxy.http.post("/sessions/t", headers=key)).status_code == 403
        assert (await proxy.http.get("/metrics", headers={"authorization": "Bearer no"})).status_code == 403


def test_the_settings_in_effect_are_printed_without_their_secrets() -> None:
    env = {**os.environ, **{f"STENO_{name.upper()}": value for name, value in SECRETS.items()}}
    env["STENO_REDIS_URL"] = "redis://user:pw-Xq4-secret@127.0.0.1:1/0"
    printed = subprocess.run(
        [sys.executable, "-m", "steno", "proxy", "--print-config", "--log-level", "debug"],
        capture_output=True, text=True, env=env, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert printed.returncode == 0 and "admin_key" in printed.stdout
    assert "-secret" not in printed.stdout + printed.stderr


def test_a_refused_setting_shows_nothing_of_a_secret() -> None:
    for flags in (["--port", "ak-Xq1-secret"], ["--admin-key", "ak-Xq1-secret", "--worker-key", " "]):
        ended = subprocess.run(
            [sys.executable, "-m", "steno", "proxy", *flags], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
        assert ended.returncode == 2
        if "--port" not in flags:
            assert "-secret" not in ended.stdout + ended.stderr


async def test_no_answer_no_log_and_no_representation_holds_a_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with running(**SECRETS, worker=False, log_level="debug") as proxy:
            group = (await proxy.http.post("/groups", json={"group_id": "g", "size": 1})).json()
            handed_out = [group["harness_key"], group["trials"][0]["api_key"]]
            kept = [*SECRETS.values(), *handed_out, proxy.app.state.services.keys.own]
            said = [(await proxy.http.get("/openapi.json")).text, (await proxy.http.get("/metrics")).text]
            for key in [*kept, "x"]:
                for path in (
                    "/sessions",
                    "/sessions/g.0",
                    "/g.0/v1/models",
                    "/metrics",
                    "/workers",
                    "/sessions/%00",
                    "/nowhere",
                ):
                    async with httpx.AsyncClient(base_url=proxy.url, timeout=30) as client:
                        answer = await client.get(
                            path, headers={"x-api-key": key}, params={"cursor": "x", "token": key}
                        )
                        said.append(answer.text)
            services = proxy.app.state.services
            shown = [
                services.keys,
                services.settings,
                services,
                services.hub,
                proxy.app.state.key_reloader,
                ProxySettings(**SECRETS),
            ]
            said += [repr(one) for one in shown] + [str(one) for one in shown]
    for text in [*said, *(record.getMessage() for record in caplog.records if record.name.split(".")[0] == "proxy")]:
        assert not any(key in text for key in kept), text
