"""Compose file and kustomize's bases: valid manifests, settings that the programs take, files that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inference_worker.config import WorkerSettings
from proxy.config import ProxySettings
from proxy.contracts.settings import Settings
from trainer_bridge.run_config import RunSettings

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
MANIFESTS = [
    manifest
    for page in sorted((DEPLOY / "kustomize").rglob("*.yaml"))
    if page.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(page.read_text())
]
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
PROGRAMS: dict[str, type[Settings]] = {"proxy": ProxySettings, "worker": WorkerSettings, "trainer": RunSettings}


def known(program: str, variable: str) -> bool:
    settings = PROGRAMS[program]
    name = variable.removeprefix(str(settings.model_config["env_prefix"])).lower()
    return name in settings.model_fields or name.removesuffix("_file") in settings.model_fields


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_is_valid_kubernetes(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    "page", sorted((DEPLOY / "kustomize").rglob("kustomization.yaml")), ids=lambda p: p.parent.name
)
def test_a_kustomization_names_what_is_there(page: Path) -> None:
    for resource in yaml.safe_load(page.read_text())["resources"]:
        assert (page.parent / resource).exists()


def test_pods_run_with_the_least_and_settings_exist() -> None:
    for manifest in MANIFESTS:
        if manifest["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = manifest["spec"]["template"]["spec"]
        assert spec["enableServiceLinks"] is False and spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True and container["resources"]
            for item in container.get("env", []):
                assert item["name"].startswith("PET_") or known(container["name"], item["name"]), item
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claimed = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            assert mounted == {volume["name"] for volume in spec.get("volumes", [])} | claimed


def test_the_compose_file_follows_the_compose_specification() -> None:
    subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose/compose.yaml"],
        check=True,
    )  # fmt: skip


def test_composes_settings_exist_and_its_files_are_there() -> None:
    targets = set(re.findall(r"^FROM .* AS (\S+)$", (DEPLOY.parent / "Dockerfile").read_text(), re.MULTILINE))
    for name, service in COMPOSE["services"].items():
        for variable in service.get("environment", {}):
            assert known(name, variable), (name, variable)
        if "build" in service:
            assert service["build"]["target"] in targets and service["read_only"] is True
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            here = (DEPLOY / "compose" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert here, (name, volume)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_redis_keeps_what_it_is_given() -> None:
    [bundled] = [m for m in MANIFESTS if m["kind"] == "StatefulSet" and m["metadata"]["name"] == "steno-redis"]
    args = bundled["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == COMPOSE["services"]["redis"]["command"]
    assert " ".join(args).startswith("redis-server --appendonly yes --appendfsync always --maxmemory-policy noeviction")
