"""The compose file: settings that the programs take, files that are there. Manifests for Kubernetes: tests/integration/helm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from steno.config.settings import Settings
from steno_proxy.config.settings import ProxySettings
from steno_worker.config import WorkerSettings

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
PROGRAMS: dict[str, type[Settings]] = {"proxy": ProxySettings, "worker": WorkerSettings}


def known(program: str, variable: str) -> bool:
    settings = PROGRAMS[program]
    name = variable.removeprefix(str(settings.model_config["env_prefix"])).lower()
    return name in settings.model_fields or name.removesuffix("_file") in settings.model_fields


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


def test_the_archive_of_composes_proxy_is_on_a_named_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere what has left Redis would end with the container."""
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STENO_KEYS_DIR", re.findall(r"STENO_KEYS_DIR=(\S+)", dockerfile)[0])
    proxy = COMPOSE["services"]["proxy"]
    for name, value in proxy["environment"].items():
        monkeypatch.setenv(name, value)
    archive = ProxySettings.load({}, None).archive_url
    assert archive is not None
    volumes = dict(reversed(volume.split(":")[:2]) for volume in proxy["volumes"])
    [volume] = [name for folder, name in volumes.items() if archive.startswith(f"{folder}/")]
    assert volume in COMPOSE["volumes"]


def test_redis_keeps_what_it_is_given() -> None:
    made = list(yaml.safe_load_all((DEPLOY / "kustomize/base/redis.yaml").read_text()))
    [bundled] = [manifest for manifest in made if manifest["kind"] == "StatefulSet"]
    args = bundled["spec"]["template"]["spec"]["containers"][0]["args"]
    # A pod is ended at its limit, and again while it reads its file: Redis must refuse before that. Compose sets no limit.
    at = args.index("--maxmemory")
    assert args[at + 1] == "2gb"
    assert bundled["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "4Gi"
    assert [*args[:at], *args[at + 2 :]] == COMPOSE["services"]["redis"]["command"]
    assert " ".join(args[:at]) == "redis-server --appendonly yes --appendfsync always"
    assert args[at + 2 :][:2] == ["--maxmemory-policy", "noeviction"]


def test_composes_keys_are_made_once_in_a_file_that_each_command_reads(tmp_path: Path) -> None:
    """As copied: `up` has the shell, and another one must be able to stop it."""
    page = (DEPLOY.parent / "docs/deployment.md").read_text()
    [block] = re.findall(r"^\[ -e \S+ \] \|\| install -m 600 .*?^END$", page, re.MULTILINE | re.DOTALL)
    commented = "".join(f"#   {line}\n" for line in block.splitlines())
    assert commented in (DEPLOY / "compose/compose.yaml").read_text()
    (tmp_path / "deploy/compose").mkdir(parents=True)
    subprocess.run(["bash", "-e"], input=block, cwd=tmp_path, text=True, check=True)
    made = tmp_path / "deploy/compose/.env"
    assert re.fullmatch(r"STENO_ADMIN_KEY=\w{64}\nSTENO_WORKER_KEY=\w{64}\n", made.read_text())
    assert made.stat().st_mode & 0o777 == 0o600
    first = made.read_text()
    subprocess.run(["bash", "-e"], input=block, cwd=tmp_path, text=True, check=True)
    assert made.read_text() == first and block in (DEPLOY.parent / "README.md").read_text()
    for command in re.findall(r"docker compose .*", page.partition("## Docker compose")[2].partition("\n## ")[0]):
        assert command.startswith("docker compose -f deploy/compose/compose.yaml "), command
    assert "/deploy/compose/.env" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


def test_the_page_builds_each_image_that_the_plain_manifests_of_the_demo_ask_for() -> None:
    """They are published nowhere: as copied, the pods would wait for them for ever."""
    page = (DEPLOY.parent / "docs/deployment.md").read_text()
    for folder in ("base", "overlays/cpu-demo"):
        for image in yaml.safe_load((DEPLOY / f"kustomize/{folder}/kustomization.yaml").read_text())["images"]:
            target = image["name"].removeprefix("steno-").replace("steno", "proxy")
            line = f"docker build --target {target} -t {image['name']}:{image['newTag']} .\n"
            assert -1 < page.find(line) < page.find("kubectl apply -k deploy/kustomize/overlays/cpu-demo"), line
