"""`helm template` over a matrix of values: valid Kubernetes, selectors that select, no secret where it does not belong."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.generate_docs import proxy_metrics
from steno_cli.terminal.output import EXIT_OTHER_TRAINER
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

PAGES = ("deployment", "kubernetes")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)


@every_case
def test_lint_finds_nothing(case: Path) -> None:
    done = helm("lint", "--strict", "helm/steno", "--values", str(case))
    assert done.returncode == 0, done.stdout + done.stderr


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
            elif key == "configMap" and value["name"] != "kube-root-ca.crt":  # which every namespace has
                yield "ConfigMap", value["name"]
            elif key == "claimName" and value != "models":
                yield "PersistentVolumeClaim", value
            elif key == "serviceAccountName":
                yield "ServiceAccount", value
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


def test_keys_given_are_not_made() -> None:
    assert [m for m in render("external") if m["kind"] == "Secret"] == []
    assert sum(m["kind"] == "Secret" for m in render("default")) == 2


def test_with_the_secrets_that_the_page_asks_for_every_render_is_the_same() -> None:
    """As `helm template` and Argo CD render it: whatever is drawn at random there is new each time."""
    page = (ROOT / "docs/deployment.md").read_text().partition("\n### Keys\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"`([\w.]+\.existingSecret)", page))
    words = [word for name in sorted(named) for word in ("--set", f"{name}=our-{name.partition('.')[0]}")]
    assert render("default", *words) == render("default", *words), named
    assert render("default") != render("default")


def test_a_worker_dials_every_replica_that_there_may_be_and_holds_its_own_key_only() -> None:
    manifests = render("whole")
    worker = pods(manifests)["run-steno-worker"]
    urls = environment(worker)["STENO_WORKER_PROXY"].split(",")
    maximum = only(manifests, "HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    assert urls == [f"http://run-steno-{i}.run-steno-replicas.{NAMESPACE}.svc:8081" for i in range(maximum)]
    assert "replicas" not in only(manifests, "StatefulSet", "run-steno")["spec"]  # the autoscaler's
    [keys] = [volume["secret"] for volume in worker["spec"]["volumes"] if "secret" in volume]
    assert [item["key"] for item in keys["items"]] == ["worker-key"]
    assert worker["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_streams_get_their_time_before_the_pod_is_killed() -> None:
    assert pods(render("default"))["run-steno"]["spec"]["terminationGracePeriodSeconds"] == 5 + 30 + 15
    assert pods(render("external"))["run-steno"]["spec"]["terminationGracePeriodSeconds"] == 5 + 91 + 15
    assert pods(render("whole"))["run-steno-worker"]["spec"]["terminationGracePeriodSeconds"] == 120 + 30
    trainer = pods(render("training"))["run-steno-trainer"]
    assert trainer["spec"]["terminationGracePeriodSeconds"] == 900 + 30
    assert environment(trainer)["PET_SHUTDOWN_TIMEOUT"] == "900"


def test_redis_is_open_to_the_proxy_and_workers_to_nobody_but_prometheus() -> None:
    manifests = render("whole")
    [rule] = only(manifests, "NetworkPolicy", "run-steno-redis")["spec"]["ingress"]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"
    [rule] = only(manifests, "NetworkPolicy", "run-steno-worker")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    quiet = render("whole", "--set-json", "networkPolicy.monitoring=[]")
    assert only(quiet, "NetworkPolicy", "run-steno-worker")["spec"]["ingress"] == []


def allowed(policy: Manifest) -> dict[Any, list[Manifest] | None]:
    """port -> who may connect to it (None: everybody), of a policy's ingress. A rule without ports is under None."""
    return {
        port: rule.get("from") for rule in policy["spec"]["ingress"]
        for port in [found["port"] for found in rule.get("ports", [])] or [None]
    }  # fmt: skip


def components(peers: list[Manifest] | None) -> list[str]:
    return [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in peers or []
        if "namespaceSelector" not in peer and "podSelector" in peer
    ]


@every_case
def test_the_control_plane_is_closed_to_all_but_those_who_are_named(case: Path) -> None:
    manifests = render(case)
    values = yaml.safe_load(case.read_text()) or {}
    given = values.get("networkPolicy", {})
    if given.get("enabled") is False:
        assert not [m for m in manifests if m["kind"] == "NetworkPolicy"]
        return
    ports = allowed(only(manifests, "NetworkPolicy", "run-steno"))
    assert set(ports) == {8080, 8081}
    control = ports[8081]
    asks = ["worker", "trainer", "test", *(["rollout"] if "rollout" in values else [])]
    assert control and components(control) == asks
    assert control[len(asks) :] == [*given.get("control", []), *given.get("monitoring", [])]
    agents = ports[8080]
    if given.get("agents"):
        sandboxes = [agents.pop()] if agents and "rollout" in values else []
        ask = ["test", "trainer", *(["rollout"] if "rollout" in values else [])]
        assert agents and components(agents) == ask and agents[len(ask) :] == given["agents"]
        assert [peer["namespaceSelector"]["matchLabels"] for peer in sandboxes] in (
            [], [{"kubernetes.io/metadata.name": "sandboxes"}]
        )  # fmt: skip
    else:
        assert agents is None


def test_agents_that_run_beside_trainer_and_launchers_reach_the_agents_port() -> None:
    """Those of evaluations, and terminus-2 and the like. A worker asks nothing there."""
    given = ("--set-json", f"networkPolicy.agents={json.dumps([{'ipBlock': {'cidr': '10.0.0.0/8'}}])}")
    evaluating = ("--set", "trainer.settings.eval_every=5,trainer.settings.eval_config=/models/eval.yaml")
    trained = allowed(only(render("training", *given, *evaluating), "NetworkPolicy", "run-steno"))
    assert components(trained[8080]) == ["test", "trainer"]
    rolled = allowed(
        only(render("rollouts", "--set", "rollout.settings.agent=terminus-2"), "NetworkPolicy", "run-steno")
    )
    assert components(rolled[8080]) == ["test", "trainer", "rollout"]


def test_agents_service_and_ingress_lead_to_the_agents_port_only() -> None:
    manifests = render("external")
    assert [port["targetPort"] for port in only(manifests, "Service", "run-steno")["spec"]["ports"]] == ["http"]
    for name in ("run-steno-control", "run-steno-replicas"):
        assert [port["targetPort"] for port in only(manifests, "Service", name)["spec"]["ports"]] == ["control"]
    [path] = only(manifests, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "run-steno", "port": {"name": "http"}}
    [container] = pods(manifests)["run-steno"]["spec"]["containers"]
    found = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    given = environment(pods(manifests)["run-steno"])
    assert found == {"http": given["STENO_PORT"], "control": given["STENO_CONTROL_PORT"]}


def test_the_nodes_of_a_trainer_meet_under_names_that_they_have() -> None:
    manifests = render("training")
    job, given = only(manifests, "Job"), environment(pods(manifests)["run-steno-trainer"])
    spec = job["spec"]["template"]["spec"]
    service = only(manifests, "Service", spec["subdomain"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    domain = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
    assert given["PET_RDZV_ENDPOINT"] == f"{job['metadata']['name']}-0.{domain}:29400"
    assert given["PET_LOCAL_ADDR"] == f"{job['metadata']['name']}-$(NODE).{domain}"
    names = [item["name"] for item in spec["containers"][0]["env"]]
    assert names.index("NODE") < names.index("PET_LOCAL_ADDR")  # what is referred to comes first
    # A superseded trainer's code reaches the pod, and is not started again; Kubernetes takes such a rule with `Never` alone.
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [EXIT_OTHER_TRAINER]
    assert rule["onExitCodes"]["containerName"] == spec["containers"][0]["name"] and spec["restartPolicy"] == "Never"
    assert spec["containers"][0]["command"][:3] == ["python3", "-m", "steno_cli.torchrun"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    peers = allowed(only(manifests, "NetworkPolicy", "run-steno-trainer"))
    assert components(peers[None]) == ["worker"]  # of two rules without ports, the last
    own = only(manifests, "NetworkPolicy", "run-steno-trainer")["spec"]["ingress"][0]
    assert components(own["from"]) == ["trainer"] and "ports" not in own
    [worker] = only(manifests, "NetworkPolicy", "run-steno-worker")["spec"]["ingress"]
    assert components(worker["from"]) == ["trainer"]  # NCCL


def test_a_trainer_of_one_node_looks_no_name_up() -> None:
    values = {"trainer.enabled": "true", "trainer.image": '"i:1"', "trainer.settings.model": '"m"'}
    manifests = render("default", *(word for n, v in values.items() for word in ("--set-json", f"{n}={v}")))
    given = environment(pods(manifests)["run-steno-trainer"])
    assert given["PET_STANDALONE"] == "1" and given["PET_LOCAL_ADDR"] == "127.0.0.1"
    assert "PET_NNODES" not in given and given["STENO_TRAIN_TRANSPORT"] == "stream"
    assert only(manifests, "PersistentVolumeClaim", "run-steno-trainer")["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_nothing_of_the_charts_version_is_in_the_jobs_template() -> None:
    """It can't be changed: an upgrade of the chart would be refused."""
    job = only(render("training"), "Job")
    assert job["metadata"]["labels"]["helm.sh/chart"] not in str(job["spec"])


def test_a_new_version_of_the_chart_restarts_no_worker_and_no_redis(tmp_path: Path) -> None:
    """A worker loads its model again, and Redis reads its file, for minutes: their images say whether they change."""
    shutil.copytree(ROOT / "helm/steno", tmp_path / "steno")
    about = (tmp_path / "steno/Chart.yaml").read_text()
    (tmp_path / "steno/Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*$", r"\1: 99.0.0", about))
    values = CASES[[path.stem for path in CASES].index("whole")]
    words = ("--namespace", NAMESPACE, "--values", str(values))
    new = [m for m in yaml.safe_load_all(helm("template", "run", str(tmp_path / "steno"), *words).stdout) if m]
    before, after = pods(render("whole")), pods(new)
    assert only(new, "StatefulSet", "run-steno-redis")["metadata"]["labels"]["helm.sh/chart"] == "steno-99.0.0"
    for name in ("run-steno-redis", "run-steno-worker"):
        assert after[name] == before[name]
        assert after[name]["metadata"]["labels"]["app.kubernetes.io/part-of"] == "steno"


@pytest.mark.parametrize("length", [46, 47, 50, 53])
def test_the_longest_name_leaves_redis_room_for_its_pods_labels(length: int) -> None:
    """A StatefulSet's pods have its name with a dash and up to ten characters in a label, which takes 63."""
    release = "r" * (length - 6) + "-steno"
    done = helm("template", release, "helm/steno", "--namespace", NAMESPACE)
    manifests = [found for found in yaml.safe_load_all(done.stdout) if found]
    sets = [m for m in manifests if m["kind"] == "StatefulSet"]
    assert all(len(m["metadata"]["name"]) <= 52 for m in sets), [m["metadata"]["name"] for m in sets]
    [name] = [m["metadata"]["name"] for m in sets if m["metadata"]["name"].endswith("-redis")]
    [proxy] = [m["metadata"]["name"] for m in sets if not m["metadata"]["name"].endswith("-redis")]
    assert proxy == release[:50].rstrip("-") and (length > 46 or name == f"{release}-redis")
    assert f"@{name}:6379/0" in environment(pods(manifests)[proxy])["STENO_REDIS_URL"]
    assert only(manifests, "Service", name)["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(("case", "component"), [
    ("whole", "proxy"), ("whole", "worker"), ("whole", "redis"), ("training", "trainer"),
])  # fmt: skip
def test_every_workload_takes_what_other_charts_let_one_say_of_pods(case: str, component: str) -> None:
    """That it is valid Kubernetes, test_pods.py asks of the same cases."""
    pod = pods(render(case))["run-steno" if component == "proxy" else f"run-steno-{component}"]
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert labels["example/team"] == f"rl-{component}" and labels["app.kubernetes.io/component"] == component
    assert spec["serviceAccountName"] == spec["priorityClassName"] == f"our-{component}"
    [spread] = spec["topologySpreadConstraints"]
    own, chosen = spread["labelSelector"]["matchLabels"], {"a": "b"}
    assert own == chosen if component == "trainer" else chosen != own and own.items() <= labels.items()
    if component in ("redis", "trainer"):
        assert pod["metadata"]["annotations"] == {"example/team": "rl"}
    if component != "redis":
        values = yaml.safe_load((CASES[0].parent / f"{case}.yaml").read_text())[component]
        [container] = spec["containers"]
        for name, among in (("env", container), ("volumeMounts", container), ("volumes", spec)):
            assert values[name] and all(each in among[name] for each in values[name]), name
    plain = pods(render("external"))["run-steno"]["spec"]
    assert not {"serviceAccountName", "priorityClassName", "topologySpreadConstraints"} & set(plain)


def test_objects_of_ones_own_come_with_the_release_and_know_its_names() -> None:
    manifests = render("whole")
    assert only(manifests, "ServiceAccount", "our-proxy")["metadata"]["namespace"] == NAMESPACE
    for name in ("run-steno-tasks-0", "run-steno-tasks-1"):  # from one string
        assert only(manifests, "ConfigMap", name)["data"] == {"literal": "{{ name }}"}


def test_sandboxes_reach_the_resolver_and_the_agents_port_only() -> None:
    policy = only(render("whole"), "NetworkPolicy", "run-steno-sandboxes")
    assert policy["metadata"]["namespace"] == "sandboxes" and policy["spec"]["policyTypes"] == ["Egress"]
    dns, proxy = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and dns["to"]
    assert proxy["ports"] == [{"protocol": "TCP", "port": 8080}]
    [peer] = proxy["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"


def test_the_resolvers_pods_may_listen_on_another_port() -> None:
    """Policies see the pod's port, not the Service's: OpenShift's resolver listens on 5353."""
    # null: `helm upgrade --reuse-values` of a release that had no such value. A rule without ports is one for all ports.
    for given, ports in (("[53,5353]", (53, 5353)), ("null", (53,))):
        manifests = render("whole", "--set-json", f"networkPolicy.dnsPorts={given}")
        both = [{"protocol": protocol, "port": port} for port in ports for protocol in ("UDP", "TCP")]
        for name in ("run-steno", "run-steno-sandboxes"):
            assert only(manifests, "NetworkPolicy", name)["spec"]["egress"][0]["ports"] == both


def test_sandboxes_reach_the_ingress_that_agents_are_pointed_at() -> None:
    there = {"peers": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [443]}
    given = {"ingress.enabled": True, "ingress.host": "steno.example", "networkPolicy.sandboxes.ingress": there}
    words = [word for name, value in given.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    policy = only(render("whole", *words), "NetworkPolicy", "run-steno-sandboxes")
    assert policy["spec"]["egress"][2:] == [{"ports": [{"protocol": "TCP", "port": 443}], "to": there["peers"]}]


def test_prometheus_reads_metrics_with_a_key_of_its_own() -> None:
    [endpoint] = only(render("whole"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "run-steno-keys", "key": "metrics-key"}
    assert only(render("whole"), "ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"
    for values, key in (("", "admin-key"), ("metrics-key", "metrics-key")):  # a Secret of one's own may lack it
        given = render("whole", "--set", "keys.existingSecret=ours", "--set", f"keys.metricsKey={values}")
        [endpoint] = only(given, "ServiceMonitor")["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "ours", "key": key}
        [volume] = [
            each
            for each in only(given, "StatefulSet", "run-steno")["spec"]["template"]["spec"]["volumes"]
            if each["name"] == "keys"
        ]
        mounted = {item["key"] for item in volume["secret"]["items"]}
        assert mounted == {"admin-key", "worker-key", "trial-secret", key}


def keys_of(manifests: list[Manifest]) -> set[str]:
    """Of the Secret: those that the proxy has as files."""
    volumes = only(manifests, "StatefulSet", "run-steno")["spec"]["template"]["spec"]["volumes"]
    [secret] = [volume["secret"] for volume in volumes if volume["name"] == "keys"]
    return {item["key"] for item in secret["items"]}


def test_a_viewer_key_is_made_with_the_others_and_asked_for_in_a_secret_of_ones_own() -> None:
    theirs = ("--set", "keys.existingSecret=ours")
    for words, given in (((), True), (theirs, False), ((*theirs, "--set", "keys.viewerKey=viewer-key"), True)):
        manifests = render("default", *words)
        assert ("viewer-key" in keys_of(manifests)) == given
        file = environment(pods(manifests)["run-steno"]).get("STENO_VIEWER_KEY_FILE")
        assert file == ("/run/secrets/steno/viewer-key" if given else None)
    assert "viewer-key" in only(render("default"), "Secret", "run-steno-keys")["data"]
    assert "viewerKey" in refused(keys__viewerKey="admin-key")


def test_traces_go_to_the_collector_with_a_key_from_a_secret() -> None:
    assert not any(name.startswith("STENO_OTEL") for name in environment(pods(render("default"))["run-steno"]))
    before = only(render("default"), "NetworkPolicy", "run-steno")["spec"]["egress"]
    manifests = render("traced")
    [proxy] = pods(manifests)["run-steno"]["spec"]["containers"]
    given = {item["name"]: item for item in proxy["env"] if item["name"].startswith("STENO_OTEL")}
    assert given == {
        "STENO_OTEL_ENDPOINT": {"name": "STENO_OTEL_ENDPOINT", "value": "http://collector.monitoring:4318"},
        "STENO_OTEL_CONTENT": {"name": "STENO_OTEL_CONTENT", "value": "true"},
        "STENO_OTEL_HEADERS": {
            "name": "STENO_OTEL_HEADERS",
            "valueFrom": {"secretKeyRef": {"name": "our-collector", "key": "otel-headers"}},
        },
    }
    rule = {"ports": [{"protocol": "TCP", "port": 4318}], "to": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}
    assert only(manifests, "NetworkPolicy", "run-steno")["spec"]["egress"] == [*before, rule]
    assert "otel_endpoint must say where" in refused(proxy__otelHeaders__secretName="our-collector")
    assert "'otel_headers' not allowed" in refused(proxy__settings__otel_headers="a=b")


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


def blocks_of_values() -> list[str]:
    """Of docs/kubernetes.md, one is a pod."""
    pages = [re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/{name}.md").read_text(), re.DOTALL) for name in PAGES]
    return [block for found in pages for block in found if not block.startswith("spec:")]


@pytest.mark.parametrize("block", blocks_of_values())
def test_values_in_the_documentation_render(block: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(block)
    assert render(tmp_path / "values.yaml")


def test_a_misspelt_value_is_refused_by_its_name() -> None:
    assert "'replica' not allowed" in refused(proxy__replica=2)
    assert "'keep_alive_s' not allowed" in refused(proxy__settings__keep_alive_s=2)
    assert "'lr' not allowed" in refused(trainer__settings__lr=1)
    assert "aggregation" in refused(trainer__settings__aggregation="mean")
    assert "'admin_key' not allowed" in refused(proxy__settings__admin_key="secret")
    assert "'upstream_images' not allowed" in refused(proxy__settings__upstream_images="on")
    assert "redis/mode" in refused(redis__mode="bundeld")
    assert "topologyKey" in refused(worker__topologySpreadConstraints=[{"maxSkew": 1}])


def test_values_that_do_not_go_together_are_refused() -> None:
    assert "redis.mode is memory" in refused(redis__mode="memory", proxy__replicas=2)
    assert "redis.mode is memory" in refused(redis__mode="memory", autoscaling__enabled=True)
    assert "redis.external.secretName" in refused(redis__mode="external")
    for most in ("8gb", "4gb", "4294967296", "0"):
        assert "resources.limits.memory 4Gi" in refused(redis__bundled__maxMemory=most), most
    assert "resources.limits.memory 1000000000" in refused(redis__bundled__resources__limits__memory=1_000_000_000)
    assert render("default", "--set-string", "redis.bundled.maxMemory=4000000000")
    assert "worker.image" in refused(worker__enabled=True)
    assert "above autoscaling.maxReplicas" in refused(autoscaling__enabled=True, autoscaling__minReplicas=9)
    assert "cut off the proxy itself" in refused(networkPolicy__sandboxes__enabled=True)
    assert "networkPolicy.sandboxes.ingress.peers" in refused(
        networkPolicy__sandboxes__enabled=True, ingress__enabled=True, ingress__host="steno.example"
    )
    for component in ("proxy", "redis__bundled", "worker", "trainer", "rollout"):
        said = refused(**{f"{component}__podLabels": {"team": "x", "app.kubernetes.io/component": "x"}})
        assert f"{component.replace('__', '.')}.podLabels has app.kubernetes.io/component" in said
    training = {"trainer__enabled": True, "trainer__image": "i:1"}
    assert "trainer.image" in refused(trainer__enabled=True)
    assert "trainer.settings.model" in refused(**training)
    assert "ReadWriteMany" in refused(**training, trainer__settings__model="m", trainer__nodes=2)
    staged = {
        "worker__enabled": True,
        "worker__image": "i:1",
        "worker__stagingVolume": {"persistentVolumeClaim": {"claimName": "c"}},
    }
    words = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in staged.items()]
    assert render("default", *(word for said in words for word in ("--set-json", said)))  # one worker may
    for volume in ({"persistentVolumeClaim": {"claimName": "c"}}, {"hostPath": {"path": "/nvme"}}):
        said = refused(**staged | {"worker__stagingVolume": volume}, worker__replicas=2)
        assert f"worker.stagingVolume is {next(iter(volume))}" in said
    for own in ({}, {"emptyDir": {"sizeLimit": "80Gi"}}, {"ephemeral": {"volumeClaimTemplate": {}}}):
        given = f"worker={json.dumps({'enabled': True, 'image': 'i:1', 'replicas': 2, 'stagingVolume': own})}"
        assert render("default", "--set-json", given)


@every_case
def test_notes_say_what_protects_the_control_plane(case: Path) -> None:
    args = ["--namespace", NAMESPACE, "--values", str(case), "--dry-run=client"]
    done = helm("install", "run", "helm/steno", *args)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "admin-key" in notes and "Give no sandbox the admin key" in notes
    assert ("sandboxes can reach the control plane's port" in notes) == (case.stem == "memory")
    assert ("Name your harnesses in networkPolicy.control" in notes) == (case.stem not in ("memory", "training"))
    assert ("helm rollback puts back" in notes) == (case.stem != "external")
    assert ("job/run-steno-rollout" in notes) == (case.stem == "rollouts")
    assert ("This release has no worker" in notes) == (case.stem not in ("whole", "training"))
    assert ("job/run-steno-trainer" in notes) == (case.stem in ("training", "offline"))
    assert ("until networkPolicy.monitoring names its pods" in notes) == (case.stem == "training")
    assert "Set keys.metricsKey before you rotate it" not in notes
    assert ("A helm rollback sets as many replicas" in notes) == (case.stem in ("scaled-by-cpu", "whole"))
    assert ("https://steno.example/rl/steno\n" in notes) == (case.stem == "external")
    assert ("Replicas share no archive" in notes) == (case.stem in ("scaled-by-cpu", "whole"))


def test_notes_say_what_a_rotation_of_the_admin_key_would_do_to_prometheus() -> None:
    ours = ["--set", "keys.existingSecret=ours,serviceMonitor.enabled=true", "--namespace", NAMESPACE]
    for more, told in (([], True), (["--set", "keys.metricsKey=metrics-key"], False)):
        done = helm("install", "run", "helm/steno", *ours, *more, "--dry-run=client")
        assert done.returncode == 0, done.stderr
        assert ("Set keys.metricsKey before you rotate it" in done.stdout.partition("NOTES:")[2]) == told
