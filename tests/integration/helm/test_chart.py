"""`helm template` over a matrix of values: valid Kubernetes, selectors that select, no secret where it does not belong."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from scripts.generate_docs import proxy_metrics
from tests.integration.helm.support import (
    CASES,
    NAMESPACE,
    ROOT,
    Manifest,
    environment,
    helm,
    only,
    pods,
    refused,
    render,
)

pytestmark = pytest.mark.helm

FOREIGN = ("monitoring.coreos.com/v1",)
"""Kinds of the Prometheus operator: Kubernetes has no schema of them."""
every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)


@every_case
def test_lint_finds_nothing(case: Path) -> None:
    done = helm("lint", "--strict", "helm/steno", "--values", str(case))
    assert done.returncode == 0, done.stdout + done.stderr


@every_case
@pytest.mark.parametrize("version", ["1.27", "1.31", "1.35", "1.37"])
def test_every_manifest_is_valid_kubernetes(case: Path, version: str) -> None:
    for manifest in render(case):
        if manifest["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)


@every_case
def test_every_selector_selects_pods_of_the_release(case: Path) -> None:
    manifests = render(case)
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    services = [m["metadata"]["labels"] for m in manifests if m["kind"] == "Service"]
    for manifest in manifests:
        for kind, selector in selectors(manifest):
            among = services if kind == "ServiceMonitor" else labels
            assert sum(selector.items() <= found.items() for found in among) == 1, (manifest["metadata"], selector)
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= template.items()


def selectors(manifest: Manifest) -> Iterator[tuple[str, dict[str, str]]]:
    """(kind, labels) of what this manifest selects in the release."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Service":
        yield kind, spec["selector"]
    elif kind in ("PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
        yield kind, spec["selector"]["matchLabels"]
    elif kind == "NetworkPolicy" and not manifest["metadata"]["name"].endswith("-sandboxes"):
        yield kind, spec["podSelector"]["matchLabels"]


@every_case
def test_names_that_refer_to_each_other_exist(case: Path) -> None:
    manifests = render(case)
    names = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    for manifest in manifests:
        if manifest["kind"] == "StatefulSet":
            service = only(manifests, "Service", manifest["spec"]["serviceName"])
            assert service["spec"]["clusterIP"] == "None"
        for kind, name in references(manifest):
            assert (kind, name) in names or name.startswith("our-"), (manifest["metadata"]["name"], kind, name)
    assert {m["metadata"]["namespace"] for m in manifests} <= {NAMESPACE, "sandboxes"}


def references(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("secretKeyRef", "credentials"):
                yield "Secret", value["name"]
            elif key == "secretName" and "items" in node:
                yield "Secret", value
            elif key == "scaleTargetRef":
                yield value["kind"], value["name"]
            elif key == "backend":
                yield "Service", value["service"]["name"]
            else:
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


@every_case
def test_secrets_are_in_secrets_alone(case: Path) -> None:
    manifests = render(case)
    values = [base64.b64decode(v).decode() for m in manifests if m["kind"] == "Secret" for v in m["data"].values()]
    rest = str([m for m in manifests if m["kind"] != "Secret"])
    assert all(len(value) >= 32 and value not in rest for value in values)
    assert len(set(values)) == len(values)
    for pod in pods(manifests).values():
        assert not {"STENO_ADMIN_KEY", "STENO_WORKER_KEY", "STENO_TRIAL_SECRET"} & set(environment_names(pod))


def environment_names(pod: Manifest) -> list[str]:
    return [item["name"] for item in pod["spec"]["containers"][0].get("env", [])]


@every_case
def test_pods_run_with_the_least(case: Path) -> None:
    for name, pod in pods(render(case)).items():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False  # a Service named steno would inject STENO_PORT
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]
            if not name.endswith("-worker"):
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_keys_given_are_not_made() -> None:
    assert [m for m in render("external") if m["kind"] == "Secret"] == []
    assert sum(m["kind"] == "Secret" for m in render("default")) == 2


def test_a_worker_dials_every_replica_that_there_may_be_and_holds_its_own_key_only() -> None:
    manifests = render("whole")
    worker = pods(manifests)["run-steno-worker"]
    urls = environment(worker)["STENO_WORKER_PROXY"].split(",")
    maximum = only(manifests, "HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    assert urls == [f"ws://run-steno-{i}.run-steno-replicas.{NAMESPACE}.svc:8080" for i in range(maximum)]
    assert "replicas" not in only(manifests, "StatefulSet", "run-steno")["spec"]  # the autoscaler's
    [keys] = [volume["secret"] for volume in worker["spec"]["volumes"] if "secret" in volume]
    assert [item["key"] for item in keys["items"]] == ["worker-key"]
    assert worker["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_streams_get_their_time_before_the_pod_is_killed() -> None:
    assert pods(render("default"))["run-steno"]["spec"]["terminationGracePeriodSeconds"] == 5 + 30 + 15
    assert pods(render("external"))["run-steno"]["spec"]["terminationGracePeriodSeconds"] == 5 + 91 + 15
    assert pods(render("whole"))["run-steno-worker"]["spec"]["terminationGracePeriodSeconds"] == 120 + 30


def test_redis_is_open_to_the_proxy_and_workers_to_nobody_but_prometheus() -> None:
    manifests = render("whole")
    [rule] = only(manifests, "NetworkPolicy", "run-steno-redis")["spec"]["ingress"]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"
    [rule] = only(manifests, "NetworkPolicy", "run-steno-worker")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    quiet = render("whole", "--set-json", "networkPolicy.monitoring=[]")
    assert only(quiet, "NetworkPolicy", "run-steno-worker")["spec"]["ingress"] == []


def test_clients_narrow_down_who_connects_beside_the_releases_own_pods() -> None:
    [rule] = only(render("whole"), "NetworkPolicy", "run-steno")["spec"]["ingress"]
    own = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"][:2]]
    assert own == ["worker", "test"]
    assert rule["from"][2:] == [{"namespaceSelector": {"matchLabels": {"steno": "sandboxes"}}, "podSelector": {}}]
    [rule] = only(render("default"), "NetworkPolicy", "run-steno")["spec"]["ingress"]
    assert "from" not in rule


def test_sandboxes_reach_the_resolver_and_the_proxys_port_only() -> None:
    policy = only(render("whole"), "NetworkPolicy", "run-steno-sandboxes")
    assert policy["metadata"]["namespace"] == "sandboxes" and policy["spec"]["policyTypes"] == ["Egress"]
    dns, proxy = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and dns["to"]
    assert proxy["ports"] == [{"protocol": "TCP", "port": 8080}]
    [peer] = proxy["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"


def test_prometheus_reads_metrics_with_the_admin_key() -> None:
    [endpoint] = only(render("whole"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "run-steno-keys", "key": "admin-key"}
    assert only(render("whole"), "ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"


def test_rules_and_dashboard_are_the_generated_ones() -> None:
    manifests = render("whole", "--set-json", "prometheusRule.enabled=true", "--set-json", "dashboard.enabled=true")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    assert only(manifests, "PrometheusRule")["spec"] == rules
    board = only(manifests, "ConfigMap", "run-steno-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["data"]["steno.json"] == (ROOT / "deploy/grafana/steno.json").read_text()


def test_the_autoscalers_metric_is_one_that_the_proxy_has() -> None:
    [metric] = only(render("whole"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {found.name for found in proxy_metrics()}
    [metric] = only(render("scaled-by-cpu"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["resource"]["target"] == {"type": "Utilization", "averageUtilization": 60}


@pytest.mark.parametrize(
    "block", re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL)
)
def test_values_in_the_documentation_render(block: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(block)
    assert render(tmp_path / "values.yaml")


def test_a_misspelt_value_is_refused_by_its_name() -> None:
    assert "'replica' not allowed" in refused(proxy__replica=2)
    assert "'keep_alive_s' not allowed" in refused(proxy__settings__keep_alive_s=2)
    assert "'admin_key' not allowed" in refused(proxy__settings__admin_key="secret")
    assert "redis/mode" in refused(redis__mode="bundeld")


def test_values_that_do_not_go_together_are_refused() -> None:
    assert "redis.mode is memory" in refused(redis__mode="memory", proxy__replicas=2)
    assert "redis.mode is memory" in refused(redis__mode="memory", autoscaling__enabled=True)
    assert "redis.external.secretName" in refused(redis__mode="external")
    assert "worker.image" in refused(worker__enabled=True)
    assert "above autoscaling.maxReplicas" in refused(autoscaling__enabled=True, autoscaling__minReplicas=9)
    assert "cut off the proxy itself" in refused(networkPolicy__sandboxes__enabled=True)


@every_case
def test_notes_say_what_protects_the_control_plane(case: Path) -> None:
    args = ["--namespace", NAMESPACE, "--values", str(case), "--dry-run=client"]
    done = helm("install", "run", "helm/steno", *args)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "share one port" in notes and "admin-key" in notes
    assert ("No worker is part of this release" in notes) == (case.stem != "whole")
    assert ("https://steno.example/rl/steno/sessions/my-trial" in notes) == (case.stem == "external")
