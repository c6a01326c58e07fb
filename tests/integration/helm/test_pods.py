"""What every pod must be like, whether the chart or kustomize makes it."""

from __future__ import annotations

import math
import os
import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest

from steno.config.settings import Settings
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings
from tests.integration.helm.support import CASES, OVERLAYS, ROOT, Manifest, environment, kustomize, pods, rendered

pytestmark = pytest.mark.helm

FOREIGN = ("monitoring.coreos.com/v1",)
"""Kinds of the Prometheus operator: Kubernetes has no schema of them."""
PROGRAMS: dict[str, type[Settings]] = {
    "proxy": ProxySettings, "worker": WorkerSettings, "trainer": RunSettings, "rollout": RolloutSettings,
}  # fmt: skip
SECRETS = {"STENO_ADMIN_KEY", "STENO_WORKER_KEY", "STENO_TRIAL_SECRET", "STENO_WORKER_API_KEY", "STENO_TRAIN_KEY"} | {
    "STENO_ROLLOUT_KEY"
}
made = cache(rendered)
every_source = pytest.mark.parametrize("source", [*CASES, *OVERLAYS], ids=lambda path: path.stem)


def containers(source: Path) -> Iterator[tuple[Manifest, Manifest]]:
    """(pod, container), of all pods."""
    for pod in pods(made(source)).values():
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            yield pod, container


@every_source
@pytest.mark.parametrize("version", ["1.29", "1.31", "1.35", "1.37"])
def test_every_manifest_is_valid_kubernetes(source: Path, version: str) -> None:
    for manifest in made(source):
        if manifest["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_walk_throughs_own_kustomization_names_images_and_adds_a_setting(tmp_path: Path) -> None:
    text = (ROOT / "docs/deployment.md").read_text().partition("ours/kustomization.yaml <<'END'\n")[2]
    shutil.copytree(ROOT / "deploy/kustomize", tmp_path / "deploy/kustomize")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/kustomization.yaml").write_text(textwrap.dedent(text[: text.index("   END\n")]))
    found = pods(kustomize(tmp_path / "ours"))
    assert {pod["spec"]["containers"][0]["image"].rpartition("/")[2] for pod in found.values()} == {
        "steno-proxy:0.1.0", "steno-worker:0.1.0", "steno-trainer:0.1.0", "redis:7.2-bookworm",
    }  # fmt: skip
    assert environment(found["steno-trainer"])["STENO_TRAIN_LEARNING_RATE"] == "2e-6"


@every_source
def test_pods_run_with_the_least(source: Path) -> None:
    for pod, container in containers(source):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False  # a Service named steno would inject STENO_PORT
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]


@every_source
def test_every_pod_has_a_policy_that_says_who_may_connect(source: Path) -> None:
    if source.stem == "memory":
        return  # networkPolicy.enabled is false there
    chosen = [
        manifest["spec"]["podSelector"]["matchLabels"]
        for manifest in made(source)
        if manifest["kind"] == "NetworkPolicy" and "Ingress" in manifest["spec"]["policyTypes"]
    ]
    for name, pod in pods(made(source)).items():
        labels = pod["metadata"]["labels"]
        assert name.endswith("-test-ready") or any(found.items() <= labels.items() for found in chosen), name


@every_source
def test_programs_take_their_variables(source: Path) -> None:
    for _, container in containers(source):
        settings = PROGRAMS.get(container["name"])
        for item in container.get("env", []):
            name: str = item["name"]
            if not name.startswith("STENO_"):
                continue
            assert settings is not None, (container["name"], name)
            field = name.removeprefix(str(settings.model_config["env_prefix"])).lower()
            assert {field, field.removesuffix("_file")} & set(settings.model_fields), name


@every_source
def test_no_secret_is_in_a_value_or_an_argument(source: Path) -> None:
    for _, container in containers(source):
        assert not SECRETS & {item["name"] for item in container.get("env", [])}
        for word in [*container.get("command", []), *container.get("args", [])]:
            assert "$(" not in word, word  # it would be in the list of processes


@every_source
def test_what_is_written_is_on_a_volume(source: Path) -> None:
    """Folders that the images' Dockerfile and the settings name."""
    volume = re.findall(r"^VOLUME (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(set(volume)) == 1
    for pod, container in containers(source):
        if container["name"] not in PROGRAMS:
            continue
        claims = {found["name"] for found in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == claims
        given = environment(pod)
        written = [given[name] for name in given if re.search(r"^HOME$|TMPDIR|_DIR$|METRICS_FILE$", name)]
        for path in [*volume, *written]:
            assert not on(path, mounts).get("readOnly"), path
        read = [given[name] for name in given if re.search(r"_KEY_FILE$|_SECRET_FILE$|_DEEPSPEED$", name)]
        assert read or container["name"] == "redis"
        for path in read:
            assert on(path, mounts)["readOnly"] is True, path


def on(path: str, mounts: dict[str, Any]) -> dict[str, Any]:
    found = [str(parent) for parent in [PurePosixPath(path), *PurePosixPath(path).parents] if str(parent) in mounts]
    assert found, f"{path} is on the image's own root, which is read-only"
    return dict(mounts[found[0]])


@every_source
def test_ended_sessions_do_not_end_with_the_pod(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave Redis's disk for the archive: nowhere, for an object store, or for a claim."""
    image = re.findall(r"STENO_KEYS_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    [pod] = [pod for pod, container in containers(source) if container["name"] == "proxy"]
    given = {"STENO_KEYS_DIR": image[0]} | environment(pod)
    if source.stem == "external":  # it is in a Secret
        given["STENO_REDIS_URL"] = "redis://redis:6379/0"
    for name in given:
        if not name.endswith("_FILE"):
            monkeypatch.setenv(name, given[name])
    archive = ProxySettings.load({}, None).archive_url
    assert (archive is None) == (source.stem in ("memory", "scaled-by-cpu", "whole"))  # Redis alone keeps them
    if archive is None or "://" in archive:
        return
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    claim = volumes[on(archive, mounts)["name"]]["persistentVolumeClaim"]["claimName"]
    names = {found["metadata"]["name"] for found in made(source) if found["kind"] == "PersistentVolumeClaim"}
    assert claim in names or claim.startswith("our-")


@every_source
def test_what_runs_gets_its_time_to_end(source: Path) -> None:
    for pod, container in containers(source):
        given = environment(pod)
        if container["name"] == "trainer":
            least = float(given["PET_SHUTDOWN_TIMEOUT"])
        elif container["name"] == "worker":
            least = float(given.get("STENO_WORKER_DRAIN_S", WorkerSettings.model_fields["drain_s"].default))
        elif container["name"] == "proxy":
            slept = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[-1]
            least = float(slept) + float(
                given.get("STENO_SHUTDOWN_S", ProxySettings.model_fields["shutdown_s"].default)
            )
        else:
            continue
        assert pod["spec"]["terminationGracePeriodSeconds"] >= math.ceil(least) + 10


@every_source
def test_images_have_a_tag_and_ours_the_projects_version(source: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, container in containers(source):
        repository, _, tag = container["image"].rpartition(":")
        assert repository and tag not in ("", "latest"), container["image"]
        if re.fullmatch(r"steno(-worker|-trainer)?", repository):
            assert tag == version
