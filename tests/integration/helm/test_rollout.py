"""Rollouts from inside the cluster: what their ServiceAccount can do, what the Job gives to `steno rollout`, and policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steno_rollouts.config import RolloutSettings
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.kubernetes.pods.manifest import QUEUE, PodSandbox, pod
from tests.integration.helm.support import NAMESPACE, Manifest, environment, only, pods, refused, render
from tests.support.machine.cluster_rights import NEEDED

pytestmark = pytest.mark.helm

NAME = "run-steno-rollout"
MARKS = {"steno.run": "our-run", "steno.trial": "t", "steno.launcher": "l"}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render("rollouts")


def sandbox(options: KubernetesOptions) -> Manifest:
    """A trial's pod, as the environment makes it with these options."""
    return pod(PodSandbox("t", "i:1", "a", MARKS, options.deadline_s, queue=options.queue, template=options.template,
                       node_selector=options.node_selector))  # fmt: skip


def test_rollouts_can_do_what_their_tests_saw_them_ask_and_no_more(manifests: list[Manifest]) -> None:
    role, binding = only(manifests, "Role"), only(manifests, "RoleBinding")
    allowed = [
        (group, verb, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    ]
    assert {(verb, resource) for _, verb, resource in allowed} == NEEDED and len(allowed) == len(NEEDED)
    assert {group for group, _, resource in allowed if resource == "leases"} == {"coordination.k8s.io"}
    assert {group for group, _, resource in allowed if resource != "leases"} == {""}
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "sandboxes" != NAMESPACE
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]
    assert only(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    kinds = {found["kind"] for found in manifests}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    tokens = [name for name, found in pods(manifests).items() if "serviceAccountToken" in json.dumps(found)]
    assert tokens == [NAME], "no other pod has one"
    assert pods(manifests)[NAME]["spec"]["serviceAccountName"] == NAME


def test_by_default_there_is_none_of_it() -> None:
    found = render("default")
    assert not {"Role", "RoleBinding", "ServiceAccount"} & {each["kind"] for each in found}
    assert not [each for each in found if "rollout" in each["metadata"]["name"]]


def test_the_job_runs_rollouts_that_share_a_run(
    manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = only(manifests, "Job", NAME)["spec"]
    assert (job["completions"], job["parallelism"], job["podReplacementPolicy"]) == (2, 2, "Failed")
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}, (
        "a drained node is no failure"
    )
    [container] = job["template"]["spec"]["containers"]
    assert container["command"] == ["steno", "rollout"] and "args" not in container
    (tmp_path / "run-key").write_text("rk-of-the-run")
    for name, value in environment(job["template"]).items():
        monkeypatch.setenv(name, value.replace("/run/secrets/steno", str(tmp_path)))
    settings = RolloutSettings.load({}, None)
    assert settings.key and settings.key.get_secret_value() == "rk-of-the-run"
    assert (settings.proxy, settings.work_dir) == (f"http://run-steno-control.{NAMESPACE}.svc:8081", Path("/work"))
    assert (settings.harbor, settings.agent, settings.agent_in_image) == ("/tasks", "mini-swe-agent", True)
    assert (settings.run, settings.group_size, settings.in_flight) == ("our-run", 16, 128)
    assert settings.environment == "kubernetes"
    options = of_the_job(manifests, settings, tmp_path)
    assert (options.namespace, options.queue, options.deadline_s) == ("sandboxes", "environments", 7200)
    made = sandbox(options)
    assert made["metadata"]["labels"][QUEUE] == "environments"
    assert made["spec"]["runtimeClassName"] == "gvisor" and made["spec"]["nodeSelector"] == {"pool": "environments"}


def of_the_job(manifests: list[Manifest], settings: RolloutSettings, folder: Path) -> KubernetesOptions:
    """The options that the rollouts will read, with the file that they name where it is here."""
    given: dict[str, Any] = dict(settings.environment_options)
    for name, text in only(manifests, "ConfigMap", NAME)["data"].items():
        (folder / name).write_text(text)
    given["template"] = given["template"].replace("/etc/steno", str(folder))
    return KubernetesOptions.of(given)


def test_the_policy_of_sandboxes_holds_the_pods_of_trials(manifests: list[Manifest]) -> None:
    labels = sandbox(KubernetesOptions())["metadata"]["labels"]
    policy = only(manifests, "NetworkPolicy", "run-steno-sandboxes")
    assert policy["metadata"]["namespace"] == "sandboxes" and policy["spec"]["policyTypes"] == ["Egress"]
    assert selects(policy["spec"]["podSelector"], labels)
    proxy = only(manifests, "NetworkPolicy", "run-steno")["spec"]["ingress"]
    [agents] = [rule for rule in proxy if rule["ports"] == [{"protocol": "TCP", "port": 8080}]]
    peer = agents["from"][-1]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "sandboxes"}}
    assert selects(peer["podSelector"], labels), "else no trial reaches the proxy"
    assert only(manifests, "NetworkPolicy", NAME)["spec"]["ingress"] == []


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def test_rollouts_that_lack_something_or_would_have_the_proxys_keys_are_refused() -> None:
    whole = {
        "rollout__enabled": True, "rollout__image": "i:1", "rollout__namespace": "sandboxes", "rollout__keySecret": "s",
        "rollout__settings": {"harbor": "/tasks", "agent": "codex", "run": "r"},
    }  # fmt: skip
    for name in ("image", "namespace", "keySecret"):
        assert f"rollout.{name} is missing" in refused(**whole | {f"rollout__{name}": ""})
    assert "rollout.settings.run is missing" in refused(
        **whole | {"rollout__settings": {"harbor": "/tasks", "agent": "codex"}}
    )
    assert "rollout.namespace is the release's" in refused(**whole | {"rollout__namespace": NAMESPACE})
    assert "rollout.environmentOptions has queue" in refused(**whole, rollout__environmentOptions={"queue": "q"})
    elsewhere = {"networkPolicy__sandboxes": {"enabled": True, "namespace": "other"}}
    assert "the pods of trials are in rollout.namespace, sandboxes" in refused(**whole, **elsewhere)
    for name, value in {"executor": "local", "verifiers": "gsm8k", "verifiers_options": {"a": 1}}.items():
        assert f"'{name}' not allowed" in refused(**whole, **{f"rollout__settings__{name}": value})
