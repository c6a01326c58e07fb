"""What the compose file brings up: an agent's turn on record in Redis, targets that are up, rules that load, panels that draw."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import yaml

from steno.client.client import Client
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from tests.integration.image.played import COMPOSE, FOLDER, Played, asked, playing
from tests.integration.image.test_image import buildah
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.image

PANELS = [
    panel for panel in json.loads((ROOT / "deploy/grafana/steno.json").read_text())["panels"] if "targets" in panel
]
# They draw what goes wrong, or what a trainer and updates of the policy bring.
QUIET = {
    "Requests with a wrong key", "Calls of the store that failed", "Turns whose worker was lost, by what became of them",
    "Retries, by what became of them", "Turns that broke", "Items dropped, by type", "Echoes that were not recognised",
    "Share of turns that lost their history, by dialect", "Templates that can't be extended", "Tokens that no record holds",
    "Policy updates, by how they ended", "Updates on workers that failed, by error", "Pause of an update, 95th percentile",
    "Tokens sampled with constraints, as a share", "Steps", "Ledger of the run, by what became of its tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    container = buildah("from", "--pull-never", os.environ["STENO_TEST_IMAGE"])
    try:
        with playing(container, tmp_path_factory.mktemp("compose")) as played:
            yield played
    finally:
        buildah("rm", container)


def record_a_group(played: Played, group_id: str) -> None:
    """Two agents' turns, judged, leased and acknowledged, as a training run does it."""
    with Client(played.url("proxy"), played.keys["STENO_ADMIN_KEY"]) as client:
        for trial in client.create_group(GroupSpec(group_id=group_id, run_id="run", size=2)).trials:
            with openai.OpenAI(base_url=trial.urls["openai"], api_key=trial.api_key) as agent:
                agent.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=8
                )
            client.complete(trial.session.trial_id, Completion(reward=1.0))
        [lease] = client.lease(LeaseRequest(run_id="run", consumer="test", wait_s=30))
        client.acknowledge(lease.lease_id)


def drawn(played: Played) -> set[str]:
    """Panels whose queries have something to draw; one that Prometheus refuses fails."""
    url = played.url("prometheus")
    return {
        panel["title"]
        for panel in PANELS
        if any(asked(url, "query", query=target["expr"])["result"] for target in panel["targets"])
    }


def test_a_turn_is_recorded_and_every_panel_of_a_healthy_fleet_draws(played: Played) -> None:
    expected = {panel["title"] for panel in PANELS if not panel["title"].startswith("Training: ")} - QUIET
    missing, rounds, until = expected, 0, time.monotonic() + 180
    while missing:
        assert time.monotonic() < until, f"nothing to draw: {sorted(missing)}"
        record_a_group(played, f"group-{rounds}")
        rounds += 1
        missing = expected - drawn(played)
    with Client(played.url("proxy"), played.keys["STENO_ADMIN_KEY"]) as client:
        assert client.session_page(group_id="group-0").items[0].counts.completion_tokens > 0
    for service in ("proxy", "worker"):
        assert "Traceback" not in (played.folder / f"{service}.log").read_text()


def test_prometheus_finds_its_targets_and_loads_the_rules(played: Played) -> None:
    url = played.url("prometheus")
    until = time.monotonic() + 120
    while True:
        with contextlib.suppress(httpx.TransportError):
            targets = asked(url, "targets", state="active")["activeTargets"]
            if targets and all(target["health"] == "up" for target in targets):
                break
        assert time.monotonic() < until, targets
        time.sleep(0.5)
    assert {target["labels"]["job"] for target in targets} == {"steno-proxy", "steno-worker"}
    loaded = [rule for group in asked(url, "rules")["groups"] for rule in group["rules"]]
    written = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())["groups"]
    assert {rule["name"] for rule in loaded} == {rule["alert"] for group in written for rule in group["rules"]}
    for rule in loaded:
        assert rule["health"] != "err", rule
    firing = {alert["labels"]["alertname"] for alert in asked(url, "alerts")["alerts"] if alert["state"] == "firing"}
    assert firing <= {"StenoStoreErrors"}, "but for that of a Redis that was silent for 2 s, on a busy disk"


def test_grafana_is_given_the_dashboard_and_where_prometheus_is() -> None:
    services = COMPOSE["services"]
    mounts = dict(mount.removesuffix(":ro").split(":")[:2] for mount in services["grafana"]["volumes"])
    [provider] = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    [source] = yaml.safe_load((FOLDER / "grafana/datasource.yaml").read_text())["datasources"]
    assert mounts["./grafana/dashboards.yaml"].startswith("/etc/grafana/provisioning/dashboards/")
    assert mounts["./grafana/datasource.yaml"].startswith("/etc/grafana/provisioning/datasources/")
    assert mounts["../grafana"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:" + services["prometheus"]["ports"][0].rpartition(":")[2]
