"""The chart, rendered by the real helm; the plain manifests, by the real kustomize."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted(path.parent for path in (ROOT / "deploy/kustomize").rglob("kustomization.yaml"))
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


def kustomize(folder: Path) -> list[Manifest]:
    """The manifests of `kubectl kustomize`."""
    done = subprocess.run([ROOT / "scripts/kubectl", "kustomize", folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def rendered(source: Path) -> list[Manifest]:
    """source: one of CASES or OVERLAYS."""
    return kustomize(source) if source in OVERLAYS else render(source)


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
    """Pod templates (metadata and spec) by the name of what owns them; of a Job, as its controller makes the first pod."""
    found = {
        m["metadata"]["name"]: copy.deepcopy(m) if m["kind"] == "Pod" else copy.deepcopy(m["spec"]["template"])
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet", "Job", "Pod")
    }
    for name in (m["metadata"]["name"] for m in manifests if m["kind"] == "Job"):
        found[name]["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
    return found


def environment(pod: Manifest) -> dict[str, str]:
    """Variables of a pod's first container that have a value in the manifest."""
    return {item["name"]: item["value"] for item in pod["spec"]["containers"][0].get("env", []) if "value" in item}
