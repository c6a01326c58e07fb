"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CASES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
NAMESPACE = "training"

Manifest = dict[str, Any]


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "scripts/helm", *args], capture_output=True, text=True, timeout=300)


def render(case: str | Path = "default", *args: str) -> list[Manifest]:
    """The manifests of `helm template` with these values (a file of values/, or its stem), hooks included."""
    path = case if isinstance(case, Path) else Path(__file__).parent / f"values/{case}.yaml"
    done = helm("template", "run", "helm/steno", "--namespace", NAMESPACE, "--values", str(path), *args)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def refused(**values: Any) -> str:
    """What helm says about values (dotted name: JSON value, `__` for the dot) that it must refuse."""
    sets = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in values.items()]
    done = helm(
        "template", "run", "helm/steno", "--namespace", NAMESPACE, *(w for s in sets for w in ("--set-json", s))
    )
    assert done.returncode != 0, "it was accepted"
    return done.stderr


def only(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    [found] = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates (metadata and spec) by the name of what owns them."""
    return {
        m["metadata"]["name"]: m if m["kind"] == "Pod" else m["spec"]["template"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet", "Pod")
    }


def environment(pod: Manifest) -> dict[str, str]:
    """Variables of a pod's container that have a value in the manifest."""
    return {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"] if "value" in item}
