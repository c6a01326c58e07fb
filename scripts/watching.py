"""What to look at: Prometheus' rules and Grafana's dashboard, made from the panels of the proxy, the worker and the trainer.

Each panel is one graph, and one alert where it has a condition. Written by scripts/docs; nothing here is edited by hand.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

import yaml

from steno_proxy.metrics import PANELS, Panel, grew
from steno_trainer.reporting.metrics import MEASURES

_NOTE = (
    "# Made by scripts/docs from proxy/steno_proxy/metrics.py and scripts/watching.py. Change those, then run that.\n"
)
_DOCS = "docs/metrics.md"

WORKER_PANELS = (
    Panel(
        "Engines that can generate",
        "min by (instance) (steno_worker_engine_up)",
        "A worker whose engine is dead ends, and is started again by its supervisor",
        "< 1 for 2m",
        "I9",
        name="EngineDead",
    ),
    Panel(
        "Proxies that a worker serves",
        "min by (instance) (steno_worker_proxies)",
        "0: it samples for nobody; its log says who refused it. Fewer than configured: a replica is away",
        "< 1 for 5m",
        name="WorkerAlone",
    ),
    Panel(
        "Weights proved",
        "min by (instance) (steno_worker_weights_proved)",
        "0: a probe of log-probabilities or a load failed, and what it sampled since waits or is condemned",
        "< 1 for 15m",
        "I10",
        urgent=True,
        name="WeightsUnproved",
    ),
    Panel(
        "Sampled tokens sent",
        "sum by (instance) (rate(steno_worker_tokens_total[1m]))",
        "Tokens a second of each worker",
    ),
    Panel(
        "Generations on workers",
        "sum by (instance) (steno_worker_streams)",
        "Uneven for long: trials are sticky, and move only when a worker is full",
    ),
    Panel(
        "Sockets opened again",
        "sum by (instance) (increase(steno_worker_reconnects_total[15m]))",
        "A rate means a bad network between workers and proxies",
        "> 5 for 15m",
        "I9",
        name="WorkerReconnects",
    ),
    Panel(
        "Updates on workers that failed, by error",
        'sum by (end) (increase(steno_worker_updates_total{end!="served"}[1h]))',
        "The worker gets no turns until it has caught up",
        grew('steno_worker_updates_total{end!="served"}', "end"),
        "I10",
        name="WorkerUpdateFailed",
    ),
    Panel(
        "Pause of an update, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(steno_worker_update_pause_seconds_bucket[1h])))",
        "Seconds for which a worker sampled nothing",
    ),
)

_TRAINER = (
    Panel(
        "Steps",
        "max(steno_train_step)",
        "Step of the current weights",
    ),
    Panel(
        "Ledger of the run, by what became of its tokens",
        "max by (outcome) (steno_train_ledger_tokens)",
        "`sampled` is the sum of all others; what is missing has no reason",
        'abs(max(steno_train_ledger_tokens{outcome="sampled"}) - sum(max by (outcome) '
        '(steno_train_ledger_tokens{outcome!="sampled"}))) > 0 for 15m',
        "I4",
        urgent=True,
        name="LedgerUnbalanced",
    ),
)
_ALERTS = {
    "mismatch": ("max(steno_train_mismatch_kl) > 0.1 for 30m", "I1", "SamplerAndTrainerDiffer"),
    "reward": ("max(steno_train_reward_zero_variance_fraction) > 0.9 for 1h", "", "RewardsAllEqual"),
}
_READING = {
    "mismatch": " A rise without staleness: sampler and trainer compute different things, or hold different weights"
}


def trainer_panels() -> tuple[Panel, ...]:
    """One graph for each group of the trainer's measures."""
    found = []
    for group, measures in groupby(MEASURES, key=lambda measure: measure.name.partition("/")[0]):
        members = list(measures)
        names = "|".join(measure.prometheus for measure in members)
        reading = "; ".join(f"`{m.name}`: {m.help}" for m in members) + "." + _READING.get(group, "")
        alert, promise, name = _ALERTS.get(group, ("", "", ""))
        found.append(
            Panel(f"Training: {group}", f'{{__name__=~"{names}"}}', reading.rstrip("."), alert, promise, name=name)
        )
    return (*_TRAINER, *found)


ROWS = (("Proxy", PANELS), ("Workers", WORKER_PANELS), ("Trainer", trainer_panels()))


def rule(panel: Panel) -> dict[str, Any]:
    condition, _, held = panel.alert.rpartition(" for ")
    if not condition:
        condition, held = panel.alert, ""
    if condition[0] in "<>=!":
        condition = f"{panel.query} {condition}"
    labels = {"severity": "critical" if panel.urgent else "warning"}
    labels |= {"promise": panel.promise} if panel.promise else {}
    made: dict[str, Any] = {"alert": f"Steno{panel.name}", "expr": condition}
    if held:
        made["for"] = held
    summary = panel.title.replace("{", "").replace("}", "")
    described = re.sub(r"[{}]", "", panel.reading)  # braces are templates to Prometheus
    return made | {"labels": labels, "annotations": {"summary": summary, "description": described, "runbook": _DOCS}}


def rule_groups() -> dict[str, Any]:
    return {
        "groups": [
            {"name": f"steno-{row.lower()}", "rules": [rule(panel) for panel in panels if panel.alert]}
            for row, panels in ROWS
        ]
    }


def rules() -> str:
    return _NOTE + yaml.safe_dump(rule_groups(), sort_keys=False, width=120, allow_unicode=True)


def dashboard() -> str:
    """Grafana's own JSON model. The data source is a variable, so that any Prometheus will do."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
             "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}
        )  # fmt: skip
        y += 1
        for index, panel in enumerate(members):
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "timeseries",
                    "title": panel.title,
                    "description": panel.reading,
                    "datasource": source,
                    "gridPos": {"h": 8, "w": 8, "x": 8 * (index % 3), "y": y + 8 * (index // 3)},
                    "fieldConfig": {"defaults": {"custom": {"fillOpacity": 10}}, "overrides": []},
                    "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                    "targets": [{"refId": "A", "datasource": source, "expr": panel.query}],
                }
            )
        y += 8 * -(-len(members) // 3)
    model = {
        "uid": "steno",
        "title": "Steno",
        "tags": ["steno"],
        "schemaVersion": 39,
        "timezone": "",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(model, indent=1, ensure_ascii=False) + "\n"
