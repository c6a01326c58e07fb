"""Keys that the chart made are found again: at an upgrade, and by the next release after an uninstallation."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.integration.helm.cluster import holding
from tests.integration.helm.support import NAMESPACE, Manifest, helm, render

pytestmark = pytest.mark.helm


def install(
    secrets: list[Manifest], manifests: list[Manifest], release: str = "run"
) -> subprocess.CompletedProcess[str]:
    """`helm template`, asking a cluster that has these Secrets."""
    with holding(secrets, manifests) as url:
        server = ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url]
        names = ["--set", "fullnameOverride=run-steno", "--namespace", NAMESPACE]
        return helm("template", release, "helm/steno", *names, *server)


def keys(manifests: list[Any]) -> dict[str, dict[str, str]]:
    return {m["metadata"]["name"]: m["data"] for m in manifests if m and m["kind"] == "Secret"}


def kept(manifests: list[Manifest]) -> list[Manifest]:
    """The Secrets as an installation leaves them: Helm writes down whose they are."""
    secrets = [m for m in manifests if m["kind"] == "Secret"]
    for secret in secrets:
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        secret["metadata"]["annotations"] |= {
            "meta.helm.sh/release-name": "run",
            "meta.helm.sh/release-namespace": NAMESPACE,
        }
    return secrets


def test_keys_that_are_there_are_kept() -> None:
    manifests = render()
    done = install(kept(manifests), manifests)
    assert done.returncode == 0, done.stderr
    assert keys(list(yaml.safe_load_all(done.stdout))) == keys(manifests)


def test_a_key_that_is_missing_is_made_beside_those_that_are_there() -> None:
    manifests = render()
    del (secrets := kept(manifests))[0]["data"]["trial-secret"]
    done = install(secrets, manifests)
    assert done.returncode == 0, done.stderr
    before, after = keys(secrets)["run-steno-keys"], keys(list(yaml.safe_load_all(done.stdout)))["run-steno-keys"]
    assert set(after) == {*before, "trial-secret"} and before.items() <= after.items()


def test_a_release_of_another_name_does_not_take_them_over() -> None:
    manifests = render()
    done = install(kept(manifests), manifests, release="other")
    assert done.returncode != 0 and "cannot be imported into the current release" in done.stderr
