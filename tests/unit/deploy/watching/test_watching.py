"""Rules and dashboard are made of metrics that there are, and say what they are for. promtool runs the rules themselves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from scripts.generate_docs import proxy_metrics
from scripts.panels import ROWS, Panel
from scripts.watching import dashboard, rule_groups
from steno.contracts.records import ForkReason
from steno_trainer.reporting.trackers import Prometheus
from steno_worker.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[4]
PANELS = [panel for _, panels in ROWS for panel in panels]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of series, as a query has them."""
    worker, trainer = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(worker)
    Prometheus(0, registry=trainer).close()
    names: set[str] = set()
    for metric in [*proxy_metrics(), *worker.collect(), *trainer.collect()]:
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(metric.type, [""])
        names |= {metric.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_names_series_that_there_are(panel: Panel, known: set[str]) -> None:
    named = set(re.findall(r"steno_(?:proxy|worker|train)_\w+", f"{panel.query} {panel.alert}"))
    assert named and named <= known, named - known


def test_a_turn_that_lost_its_history_is_counted_whatever_became_of_it() -> None:
    """Of a history that lacked a message nothing was seen: neither drawn nor an alert."""
    [panel] = [panel for panel in PANELS if panel.name == "HistoriesLost"]
    [counted] = re.findall(r'how=~"([a-z_|]+)"', panel.query)
    kept = {ForkReason.SIBLING, ForkReason.DIVERGED, ForkReason.NEW_CONVERSATION}
    assert sorted(counted.split("|")) == sorted(set(ForkReason) - kept)


def test_every_panel_is_on_the_dashboard_once_and_nothing_overlaps() -> None:
    drawn = [panel for panel in json.loads(dashboard())["panels"] if panel["type"] != "row"]
    assert [panel["targets"][0]["expr"] for panel in drawn] == [panel.query for panel in PANELS]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in drawn]
    assert len(set(places)) == len(places)
    ids = [panel["id"] for panel in json.loads(dashboard())["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_have_names_of_their_own_and_a_summary() -> None:
    rules = [rule for group in rule_groups()["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names) and "Steno" not in names
    for rule in rules:
        assert "{" not in rule["annotations"]["description"], rule["alert"]  # a template to Prometheus
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_promise_that_a_metric_can_show_has_an_alert() -> None:
    promises = {rule["labels"].get("promise") for group in rule_groups()["groups"] for rule in group["rules"]}
    # I5 (linear), I6 and I7 are of the code's shape: no metric shows them.
    assert {"I1", "I2", "I3", "I4", "I8", "I9", "I10"} <= promises


def test_promtool_takes_the_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    assert promtool, "these tests need promtool: apt-get install prometheus"
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([promtool, *words], cwd=ROOT / "deploy/prometheus", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
