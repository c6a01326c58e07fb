"""Where ended sessions go: on what outlives the pod, or nowhere; never deleted because replicas share nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.helm.support import environment, only, pods, refused, render

pytestmark = pytest.mark.helm


@pytest.mark.parametrize(
    "several", [{"proxy__replicas": 2}, {"autoscaling__enabled": True}], ids=["replicas", "autoscaling"]
)
def test_what_retention_archives_with_one_replica_is_not_deleted_with_several(several: dict[str, Any]) -> None:
    """With no archive, `retention_s` deletes: nobody has said so where the chart itself chooses `off`."""
    said = refused(proxy__settings__retention_s=3600, **several)
    for remedy in ("proxy.archive.accessModes", "proxy.archive.existingClaim", "proxy.settings.archive"):
        assert remedy in said
    words = [w for n, v in several.items() for w in ("--set-json", f"{n.replace('__', '.')}={json.dumps(v)}")]
    kept = ("--set", "proxy.settings.retention_s=3600")
    for given in ('proxy.archive.accessModes=["ReadWriteMany"]', 'proxy.archive.existingClaim="ours"',
                  'proxy.settings.archive="s3://b/p"', 'proxy.settings.archive="off"'):  # fmt: skip
        assert render("default", *kept, *words, "--set-json", given)
    assert render("default", *kept) and render("default", *words)


def test_an_archive_that_would_end_with_the_pod_is_refused() -> None:
    for lost in ("/var/lib/steno/archive", "file:///var/lib/steno/archive", "local:///archive", "memory://archive"):
        said = refused(proxy__settings__archive=lost)
        assert f"proxy.settings.archive is {lost}" in said and "volume of proxy.archive" in said
    unset = render("default", "--set-json", "proxy.settings.archive=null")
    assert environment(pods(unset)["run-steno"])["STENO_ARCHIVE"] == "/var/lib/steno/archive"
    assert only(unset, "PersistentVolumeClaim")["metadata"]["name"] == "run-steno-archive"


def test_ended_sessions_go_to_a_volume_that_all_replicas_share_or_stay_in_redis() -> None:
    def archive(name: str, *words: str) -> tuple[str | None, bool]:
        manifests = render(name, *words)
        pod = pods(manifests)["run-steno"]
        spec = pod["spec"]
        mounted = any(volume["name"] == "archive" for volume in spec["volumes"])
        assert mounted == any(mount["name"] == "archive" for mount in spec["containers"][0]["volumeMounts"])
        return environment(pod).get("STENO_ARCHIVE"), mounted

    folder = "/var/lib/steno/archive"
    many = ("--set", "proxy.replicas=3")
    assert archive("default") == (folder, True)
    assert archive("default", *many) == ("off", False)
    assert archive("default", *many, "--set-json", 'proxy.archive.accessModes=["ReadWriteMany"]') == (folder, True)
    assert archive("default", *many, "--set", "proxy.archive.existingClaim=mine") == (folder, True)
    assert archive("default", "--set", "proxy.settings.archive=s3://b/p") == ("s3://b/p", False)
    egress = only(render("default"), "NetworkPolicy", "run-steno")["spec"]["egress"]
    for peers in (
        [],
        [{"ipBlock": {"cidr": "10.2.0.0/16"}}],
    ):  # a proxy that can't reach its archive keeps all in Redis
        given = ("--set-json", f"networkPolicy.objectStore.peers={json.dumps(peers)}")
        stored = render("default", "--set", "proxy.settings.archive=s3://b/p", *given)
        rule = {"ports": [{"protocol": "TCP", "port": 443}]} | ({"to": peers} if peers else {})
        assert only(stored, "NetworkPolicy", "run-steno")["spec"]["egress"] == [*egress, rule]
    assert archive("memory", "--set", "fullnameOverride=run-steno") == ("off", False)
