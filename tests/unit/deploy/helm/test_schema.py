"""The chart's values and their schema: complete, strict, and about settings that there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.chart_schema import LEFT_OUT, PROGRAMS

CHART = Path(__file__).parents[4] / "helm/steno"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_schema_offers_every_setting_that_is_not_the_charts_own_and_no_secret(program: str) -> None:
    offered = set(SCHEMA["properties"][program]["properties"]["settings"]["properties"])
    settings = PROGRAMS[program]
    assert offered == set(settings.model_fields) - LEFT_OUT[program]
    assert LEFT_OUT[program] <= set(settings.model_fields)
    assert not [name for name in offered if "SecretStr" in str(settings.model_fields[name].annotation)]


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
    version = (Path(__file__).parents[4] / "pyproject.toml").read_text().split('\nversion = "')[1].split('"')[0]
    assert chart["appVersion"] == chart["version"] == version
