"""The chart's values and their schema: complete, strict, and about settings that there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from inference_worker.config import WorkerSettings
from proxy.config import ProxySettings
from proxy.contracts.settings import Settings

CHART = Path(__file__).parents[3] / "helm/steno"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

GIVEN_BY_THE_CHART = {
    "proxy": set("host port admin_key worker_key trial_secret keys_dir redis_url".split()),
    "worker": set("proxy key metrics_host metrics_port".split()),
}
NOT_OFFERED = {
    "proxy": set("upstream api_base api_key upstream_tokens".split()),  # the image has no LiteLLM
    "worker": {"worker_id", "api_key"},  # one id per worker, and a secret is no value
}


@pytest.mark.parametrize(("program", "settings"), [("proxy", ProxySettings), ("worker", WorkerSettings)])
def test_the_schema_offers_every_setting_that_is_not_the_charts_own(program: str, settings: type[Settings]) -> None:
    offered = SCHEMA["properties"][program]["properties"]["settings"]["properties"]
    known = {
        name: {key: value for key, value in field.items() if key not in ("title", "default")}
        for name, field in settings.model_json_schema()["properties"].items()
        if name not in GIVEN_BY_THE_CHART[program] | NOT_OFFERED[program]
    }
    assert offered == known, "values.schema.json: copy the settings' own schemas"


def test_every_object_refuses_names_that_it_does_not_know() -> None:
    def open_ones(schema: dict[str, Any], path: str) -> Iterator[str]:
        if "properties" in schema and schema.get("additionalProperties") is not False:
            yield path
        for name, inner in schema.get("properties", {}).items():
            yield from open_ones(inner, f"{path}.{name}")

    assert list(open_ones(SCHEMA, "")) == []


def test_the_defaults_are_valid_and_every_value_has_one() -> None:
    jsonschema.validate(VALUES, SCHEMA)

    def without_default(schema: dict[str, Any], values: dict[str, Any], path: str) -> Iterator[str]:
        for name, inner in schema["properties"].items():
            if name not in values:
                yield f"{path}{name}"
            elif "properties" in inner and name not in ("settings", "resources"):
                yield from without_default(inner, values[name], f"{path}{name}.")

    assert list(without_default(SCHEMA, VALUES, "")) == ["global"]  # helm's own, where the chart is part of another one


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (Path(__file__).parents[3] / "pyproject.toml").read_text().split('\nversion = "')[1].split('"')[0]
    assert chart["appVersion"] == chart["version"] == version
