"""What a pod is sent as, what its status says, and which options are refused, before any cluster is asked."""

from __future__ import annotations

import json
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from steno.contracts.errors import ConfigError
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.trials.harbor.interpreter import HarborPython
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.kubernetes.pods import shell
from steno_rollouts.trials.harbor.kubernetes.pods.errors import ERRORS
from steno_rollouts.trials.harbor.kubernetes.pods.heartbeats import RENEWED, Heartbeats
from steno_rollouts.trials.harbor.kubernetes.pods.manifest import PodSandbox, label, lease, pod, refused, secret
from steno_rollouts.trials.harbor.kubernetes.pods.states import state_of
from steno_rollouts.trials.harbor.outcome import KINDS
from steno_rollouts.trials.harbor.plan import harbor_plan

MARKS = {"steno.run": "a run, with a space", "steno.trial": "t-1", "steno.launcher": "boot/pid:[402]/7-99"}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "rl"}, "annotations": {"a": "b"}},
    "spec": {
        "serviceAccountName": "trials",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"zone": "a"},
        "imagePullSecrets": [{"name": "theirs"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "securityContext": {"fsGroup": 5},
        "containers": [
            {
                "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "4"}},
                "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                "env": [{"name": "LANG", "value": "C.UTF-8"}],
                "securityContext": {"runAsUser": 1000},
            },
            {"name": "beside", "image": "registry.test/beside", "command": ["sleep", "1d"]},
        ],
    },
}


def sandbox(**more: Any) -> PodSandbox:
    return PodSandbox("steno-1", "registry.test/i:1", "abc", MARKS, 3600, **more)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_what_is_sent_is_valid_kubernetes(version: str) -> None:
    whole = sandbox(
        cpus=0.5, memory_mb=512, storage_mb=2048, secret="steno-1", node_selector={"disk": "ssd"},
        image_pull_secrets=("ours",), queue="q", template=TEMPLATE,
    )  # fmt: skip
    alive = lease("boot/pid:[402]/7-99", 60.0, datetime(2026, 11, 24, 1, 2, 3, 45, UTC), "17")
    owned = secret("s", {"KEY": "v"}, {"name": "steno-1", "uid": "u-1"}, MARKS)
    for manifest in (pod(sandbox()), pod(whole), owned, alive):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_template_is_laid_over_the_pod_and_a_trials_own_fields_stay() -> None:
    made = pod(sandbox(cpus=2, memory_mb=512, secret="steno-1", node_selector={"disk": "ssd"},
                       image_pull_secrets=("ours",), queue="q", template=TEMPLATE))  # fmt: skip
    spec, [main, beside] = made["spec"], made["spec"]["containers"]
    assert made["metadata"]["labels"]["team"] == "rl" and made["metadata"]["labels"]["steno.trial"] == "t-1"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert made["metadata"]["annotations"] == {"a": "b", **MARKS}
    assert spec["nodeSelector"] == {"disk": "ssd", "zone": "a"} and spec["serviceAccountName"] == "trials"
    assert spec["imagePullSecrets"] == [{"name": "ours"}, {"name": "theirs"}]
    assert [volume["name"] for volume in spec["volumes"]] == ["steno-agent", "cache"]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 5}
    assert spec["activeDeadlineSeconds"] == 3600 and spec["restartPolicy"] == "Never"
    assert main["name"] == "main" and main["image"] == "registry.test/i:1" and main["command"][0] == "sh"
    assert main["resources"]["limits"] == {"cpu": "4", "memory": "512Mi", "nvidia.com/gpu": 1}
    assert main["securityContext"] == {"runAsUser": 1000, "allowPrivilegeEscalation": False}
    assert [mount["name"] for mount in main["volumeMounts"]] == ["steno-agent", "cache"]
    assert beside["name"] == "beside" and "steno.launcher" in made["metadata"]["labels"]


def test_a_label_holds_any_name_and_tells_two_apart() -> None:
    names = ["run-1", "a b", "a  b", "x" * 64, "é", "", "-a"]
    labels = [label(name) for name in names]
    assert labels[0] == "run-1" and len(set(labels)) == len(names)
    for each in labels[1:]:
        assert each.startswith("sha-") and len(each) <= 63


def test_a_secret_goes_with_its_pod_and_is_in_no_pod() -> None:
    made = secret("s", {"KEY": "very-secret"}, {"name": "steno-1", "uid": "u-1"}, MARKS)
    assert made["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "steno-1", "uid": "u-1"}]
    assert made["data"] == {"KEY": "dmVyeS1zZWNyZXQ="} and "very-secret" not in json.dumps(pod(sandbox(secret="s")))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ([], "got list, must be an object"),
        ({"spce": {}}, "spce: must be one of metadata, spec"),
        ({"spec": []}, "spec: got [], must be an object"),
        ({"metadata": {"name": "x"}}, "metadata.name: is set for each trial"),
        ({"metadata": {"labels": {"steno.run": "x"}}}, "metadata.labels: steno.run: is set"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy: is set for each trial"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0].image: is set for each trial"),
        ({"spec": {"containers": [{"name": "x"}]}}, "spec.containers[0].name: got 'x', must be 'main'"),
        ({"spec": {"containers": ["x"]}}, "spec.containers: got ['x'], must be a list of objects"),
    ],
)
def test_a_template_that_will_not_do_is_refused_by_its_field(template: Any, said: str, tmp_path: Path) -> None:
    assert said in (refused(template) or "")
    path = tmp_path / "pod.yaml"
    path.write_text(json.dumps(template))
    with pytest.raises(ConfigError) as refusal:
        KubernetesOptions.of({"template": str(path)})
    assert refusal.value.message.startswith(f"environment_options: template: {path}: {said[:8]}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"namespce": "x"}, "namespce: unknown with environment kubernetes, must be one of context, cpus, deadline_s"),
        ({"namespace": "No"}, "namespace: got 'No'"),
        ({"deadline_s": 5}, "deadline_s: got 5: Input should be greater than or equal to 60"),
        ({"deadline_s": "5m"}, "deadline_s: got '5m'"),
        ({"cpus": 0}, "cpus: got 0"),
        ({"memory_mb": 1.5}, "memory_mb: got 1.5"),
        ({"queue": "a b"}, "queue: got 'a b'"),
        ({"node_selector": {"a": 1}}, "node_selector.a: got 1"),
        ({"image_pull_secrets": "x"}, "image_pull_secrets: got 'x'"),
        ({"kubeconfig": "/not/there"}, "kubeconfig: got '/not/there': no such file"),
        ({"template": "/not/there"}, "template: /not/there: not YAML or JSON, or not readable"),
        ({"template": 5}, "template: got 5, must be the path of a file"),
    ],
)
def test_an_option_that_will_not_do_is_refused_by_its_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        KubernetesOptions.of(options)
    assert (
        refusal.value.message.startswith(f"environment_options: {said}")
        and refusal.value.field == "environment_options"
    )


def status(phase: str, state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "i:1", "state": state}] if state else []
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "i:1"}]},
        "status": {"phase": phase, "containerStatuses": containers, **more},
    }


def terminated(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason}}


DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}]


@pytest.mark.parametrize(
    ("found", "error", "words"),
    [
        (status("Failed", terminated(137), reason="Evicted", message="low on memory"), "PodEvicted", "low on memory"),
        (status("Failed", terminated(137), conditions=DISRUPTED), "PodEvicted", "PreemptionByScheduler: preempted"),
        (status("Failed", terminated(143), reason="DeadlineExceeded"), "PodDeadline", "deadline_s"),
        (status("Failed", terminated(137, "OOMKilled")), "PodOutOfMemory", "memory than its limit"),
        (status("Failed", reason="OutOfcpu", message="no room"), "PodNotStarted", "OutOfcpu: no room"),
        (status("Succeeded", terminated(0, "Completed")), "PodEnded", "exit code 0"),
        (status("Running", terminated(1)), "PodEnded", "exit code 1"),
        (status("Pending", {"waiting": {"reason": "InvalidImageName", "message": "no"}}), "ImageNotPulled", "i:1"),
        (status("Pending", {"waiting": {"reason": "CreateContainerError"}}), "PodNotStarted", "CreateContainerError"),
        (status("Pending", {"waiting": {"reason": "ContainerCreating"}}), None, "ContainerCreating"),
    ],
)  # fmt: skip
def test_each_end_of_a_pod_has_a_name_and_plain_words(found: dict[str, Any], error: str | None, words: str) -> None:
    state = state_of(found)
    assert state.error == error and not state.running and words in (state.words or state.waits)
    if error is not None:
        assert state.words.startswith("pod p on node n1 ") and isinstance(state.raised(), ERRORS[error])
        assert KINDS[error] == ("lost" if error == "PodEvicted" else "start")


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ImageInspectError"])
def test_an_image_that_is_tried_again_is_no_end_yet(reason: str) -> None:
    state = state_of(status("Pending", {"waiting": {"reason": reason, "message": "not found"}}))
    assert state.unpulled and state.raised() is None
    assert state.words == f"pod p on node n1 has no image i:1: {reason}: not found"


@pytest.mark.parametrize("condition", ["DisruptionTarget", "TerminationTarget"])
def test_who_is_taken_away_is_evicted_once_it_goes(condition: str) -> None:
    told = [{"type": condition, "status": "True", "reason": "Preempted", "message": "by another queue"}]
    running = status("Running", {"running": {}}, conditions=told)
    assert state_of(running).running
    state = state_of(running, deleted=True)
    assert (state.error, state.words) == ("PodEvicted", "pod p on node n1 was evicted: Preempted: by another queue")


def test_a_launcher_is_gone_when_its_lease_stays_as_it_was_for_so_many_looks() -> None:
    beats = Heartbeats()
    for look in range(RENEWED + 1):
        assert beats.gone({"alive": str(look), "dead": "7", "without": ""}) == []
    assert beats.gone({"alive": "9", "dead": "7", "without": "", "new": "1"}) == ["dead", "without"]
    assert beats.gone({"dead": "8", "new": "1"}) == [], "it has renewed"


def test_looks_before_the_cluster_was_away_do_not_count() -> None:
    """Meanwhile nobody could renew."""
    beats = Heartbeats()
    for _ in range(RENEWED + 1):
        beats.gone({"alive": "7"})
    beats.forget()
    for _ in range(RENEWED + 1):
        assert beats.gone({"alive": "7"}) == []


def test_a_pod_that_runs_waits_is_queued_or_was_deleted() -> None:
    running = status("Running", {"running": {}})
    assert state_of(running).running and state_of(running, deleted=True).error == "PodGone"
    assert state_of({**running, "metadata": {"name": "p", "uid": "u", "deletionTimestamp": "now"}}).error == "PodGone"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "by a queue"}
    assert state_of(status("Pending", conditions=[gated])).queued
    full = {**gated, "reason": "Unschedulable", "message": "0/3 nodes"}
    assert state_of(status("Pending", conditions=[full])).waits == "a node (Unschedulable: 0/3 nodes)"
    assert not state_of(status("Pending", conditions=[full])).queued


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_a_command_arrives_as_it_was_whatever_is_in_it(program: str) -> None:
    odd = "it's $HOME \\n `x` \\ %s é \\c\n\tnext\n\n"
    lines = shell.script(f'printf %s {shell.quote(odd)}; printf %s "$ODD" >&2', env={"ODD": odd}, cwd="/")
    assert lines.count(b"\n") == 2
    done = subprocess.run([program, "-c", shell.BOOT], input=lines, capture_output=True, timeout=60)
    assert (done.stdout.decode(), done.stderr.decode(), done.returncode) == (odd, odd, 0)


def test_what_a_secret_has_is_not_in_what_is_sent() -> None:
    secrets = {"KEY": "very-secret", "EMPTY": "x"}
    sent = shell.script("true", env={"OPENAI_API_KEY": "very-secret", "OTHER": "plain"}, secrets=secrets).decode()
    assert "very-secret" not in sent and "/run/steno/agent/KEY" in sent and "export OTHER=plain" in sent
    with pytest.raises(ValueError, match="'A B': no name of a variable"):
        shell.script("true", env={"A B": "c"})


def test_files_go_through_a_shell_whole(tmp_path: Path) -> None:
    def run(command: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        lines = shell.script(command, reads=bool(given))
        return subprocess.run(["sh", "-c", shell.BOOT], input=lines + given, capture_output=True, timeout=60)

    path, content = tmp_path / "a folder" / "it's", bytes(range(256)) * 300
    assert run(shell.write(str(path), len(content)), content).returncode == 0 and path.read_bytes() == content
    short = run(shell.write(str(path), len(content)), content[:-1])
    assert short.returncode == 1 and b"76799 of 76800 bytes came" in short.stderr
    path.write_bytes(content)
    read = run(shell.read(str(path)))
    assert read.stdout == content and read.stderr.strip() == b"76800"
    assert run(shell.read(str(tmp_path / "none"))).returncode == 44
    packed = run(shell.pack(str(path.parent)))
    there = tmp_path / "there"
    assert run(shell.unpack(str(there), len(packed.stdout)), packed.stdout).returncode == 0
    assert (there / path.name).read_bytes() == content
    assert run(shell.unpack(str(there), len(packed.stdout)), packed.stdout[:-9000]).returncode != 0


@pytest.mark.parametrize(
    ("has_client", "more", "field"),
    [(False, {}, "harbor_python"), (True, {"allow_only_proxy": True}, "allow_only_proxy")],
)
def test_what_pods_can_not_be_had_with_is_refused_by_name(
    has_client: bool, more: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = HarborPython(Path("/h/python"), "0.24.0", frozenset({"codex"}), frozenset(), kubernetes=has_client)
    monkeypatch.setattr(HarborPython, "found", lambda given: python)
    settings = RolloutSettings(harbor=str(tmp_path), agent="codex", environment="kubernetes", **more)
    with pytest.raises(ConfigError) as refusal:
        harbor_plan(settings, str(tmp_path), TaskSelection.of([], None, None))
    assert refusal.value.field == field
    if not has_client:
        project = tomllib.loads((Path(__file__).parents[6] / "pyproject.toml").read_text())
        (wanted,) = project["project"]["optional-dependencies"]["kubernetes"]
        assert f"pip install '{wanted}'" in refusal.value.message
