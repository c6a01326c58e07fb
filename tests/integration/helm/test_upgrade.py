"""What the chart made is found again, by an upgrade and after an uninstallation: keys, and claims with what is on record."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.integration.helm.cluster import holding
from tests.integration.helm.support import NAMESPACE, Manifest, helm, only, render

pytestmark = pytest.mark.helm


def install(
    objects: list[Manifest], manifests: list[Manifest], *values: str, release: str = "run"
) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values (NAME=JSON), asking a cluster that has these Secrets and claims."""
    with holding(objects, manifests) as url:
        server = ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url]
        names = ["--set", "fullnameOverride=run-steno", "--namespace", NAMESPACE]
        return helm("template", release, "helm/steno", *names, *server, *set_json(*values))


def set_json(*values: str) -> list[str]:
    return [word for value in values for word in ("--set-json", value)]


def keys(manifests: list[Any]) -> dict[str, dict[str, str]]:
    return {m["metadata"]["name"]: m["data"] for m in manifests if m and m["kind"] == "Secret"}


def kept(manifests: list[Manifest]) -> list[Manifest]:
    """Secrets and claims as an installation leaves them: Helm writes down whose they are."""
    objects = [m for m in manifests if m["kind"] in ("Secret", "PersistentVolumeClaim")]
    for found in objects:
        assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        found["metadata"]["annotations"] |= {
            "meta.helm.sh/release-name": "run",
            "meta.helm.sh/release-namespace": NAMESPACE,
        }
    return objects


def test_keys_that_are_there_are_kept() -> None:
    manifests = render()
    done = install(kept(manifests), manifests)
    assert done.returncode == 0, done.stderr
    assert keys(list(yaml.safe_load_all(done.stdout))) == keys(manifests)


def test_a_key_that_is_missing_is_made_beside_those_that_are_there() -> None:
    manifests = render()
    secrets = [m for m in kept(manifests) if m["kind"] == "Secret"]
    del only(secrets, "Secret", "run-steno-keys")["data"]["trial-secret"]
    done = install(secrets, manifests)
    assert done.returncode == 0, done.stderr
    before, after = keys(secrets)["run-steno-keys"], keys(list(yaml.safe_load_all(done.stdout)))["run-steno-keys"]
    assert set(after) == {*before, "trial-secret"} and before.items() <= after.items()


def test_a_release_of_another_name_does_not_take_them_over() -> None:
    manifests = render()
    done = install(kept(manifests), manifests, release="other")
    assert done.returncode != 0 and "cannot be imported into the current release" in done.stderr


@pytest.mark.parametrize(
    "several", [("proxy.replicas=2",), ("autoscaling.enabled=true",)], ids=["replicas", "autoscaling"]
)
def test_what_is_archived_is_not_left_behind_when_the_release_grows(several: tuple[str, ...]) -> None:
    there, manifests = kept(render()), render("default", *set_json(*several))
    shared = 'proxy.archive.accessModes=["ReadWriteMany"]'
    for values in (several, (*several, "proxy.settings.retention_s=60")):
        done = install(there, manifests, *values)
        assert done.returncode != 0 and "run-steno-archive" in done.stderr and "503" in done.stderr
        assert "proxy.archive.existingClaim" in done.stderr and "[ReadWriteOnce]" in done.stderr
    for values in ((*several, shared), (shared,)):  # Kubernetes would refuse the patch
        done = install(there, manifests, *values)
        assert done.returncode != 0 and "proxy.archive.accessModes is [ReadWriteMany]" in done.stderr
        assert "run-steno-archive" in done.stderr and "proxy.archive.existingClaim" in done.stderr
    for remedy in (
        'proxy.archive.existingClaim="ours"',
        'proxy.settings.archive="off"',
        'proxy.settings.archive="s3://b/p"',
    ):
        done = install(there, manifests, *several, remedy)
        assert done.returncode == 0, done.stderr
    assert install([], manifests, *several).returncode == 0, "nothing is archived yet"


def with_sets(manifests: list[Manifest]) -> list[Manifest]:
    """What an installation leaves, and its StatefulSets, with one replica where the manifest does not say."""
    sets = [m for m in manifests if m["kind"] == "StatefulSet"]
    for found in sets:
        found["spec"].setdefault("replicas", 1)
        found["metadata"]["annotations"] = {
            "meta.helm.sh/release-name": "run", "meta.helm.sh/release-namespace": NAMESPACE
        }  # fmt: skip
    return [*kept(manifests), *sets]


def test_a_release_that_is_paused_keeps_its_archive_and_its_names() -> None:
    manifests = render("default", *set_json("worker.enabled=true", 'worker.image="i:1"'))
    paused = render("default", *set_json("worker.enabled=true", 'worker.image="i:1"', "proxy.replicas=0"))
    only(manifests, "StatefulSet", "run-steno")["spec"]["replicas"] = 0
    for one, other in zip(without_secrets(manifests), without_secrets(paused), strict=True):
        assert one == other
    assert install(kept(render()), manifests, "proxy.replicas=0", "proxy.settings.retention_s=60").returncode == 0


def without_secrets(manifests: list[Manifest]) -> list[Manifest]:
    """Keys are others in each rendering, and so are digests of them."""
    return [m for m in manifests if m["kind"] != "Secret"]


def test_redis_volume_is_not_asked_to_change() -> None:
    manifests = render()
    there = with_sets(manifests)
    assert install(there, manifests).returncode == 0
    assert install(there, manifests, 'redis.bundled.storage="20480Mi"').returncode == 0, "the same"
    for other in ('redis.bundled.storage="40Gi"', 'redis.bundled.storageClass="fast"'):
        done = install(there, manifests, other)
        assert done.returncode != 0 and "Kubernetes does not change them" in done.stderr and "20Gi" in done.stderr


def test_an_autoscaler_takes_over_as_many_replicas_as_there_are() -> None:
    """One that had the value would fall to one first, and cut the streams of all others."""
    shared = 'proxy.archive.accessModes=["ReadWriteMany"]'
    manifests = render("default", *set_json("proxy.replicas=3", shared))
    done = install(with_sets(manifests), [*manifests, *render("scaled-by-cpu")], "autoscaling.enabled=true", shared)
    assert done.returncode == 0, done.stderr
    upgraded = [m for m in yaml.safe_load_all(done.stdout) if m]
    assert only(upgraded, "StatefulSet", "run-steno")["spec"]["replicas"] == 3
    fresh = render("default", *set_json("autoscaling.enabled=true", shared))
    assert "replicas" not in only(fresh, "StatefulSet", "run-steno")["spec"]


def test_a_claim_that_replicas_share_is_gone_on_with() -> None:
    values = ("proxy.replicas=2", 'proxy.archive.accessModes=["ReadWriteMany"]')
    manifests = render("default", *set_json(*values))
    done = install(kept(manifests), manifests, *values)
    assert done.returncode == 0, done.stderr
    done = install(kept(manifests), manifests, values[0])
    assert done.returncode != 0 and "Set the value to [ReadWriteMany]" in done.stderr


def test_checkpoints_are_not_left_behind_when_the_trainer_gets_a_second_node() -> None:
    one = ("trainer.enabled=true", 'trainer.image="i:1"', 'trainer.settings.model="m"')
    manifests = render("default", *set_json(*one))
    there = kept(manifests)
    assert install(there, manifests, *one).returncode == 0
    for more in ((), ('trainer.checkpoints.accessModes=["ReadWriteMany"]',)):
        done = install(there, manifests, *one, "trainer.nodes=2", *more)
        assert done.returncode != 0 and "run-steno-trainer" in done.stderr and "[ReadWriteOnce]" in done.stderr
        assert "trainer.checkpoints.existingClaim" in done.stderr
    done = install(there, manifests, *one, "trainer.nodes=2", 'trainer.checkpoints.existingClaim="ours"')
    assert done.returncode == 0, done.stderr
