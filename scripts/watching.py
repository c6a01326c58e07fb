"""What to look at: Prometheus' rules and Grafana's dashboard, made from the panels of the proxy, the worker and the trainer.

Each panel is one graph, and one alert where it has a condition. Written by scripts/docs; nothing here is edited by hand.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from scripts.panels import ROWS, Panel

_NOTE = "# Made by scripts/docs from scripts/panels.py by scripts/watching.py. Change those, then run that.\n"
_DOCS = "docs/metrics.md"


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
