"""The pod of a sandbox, the Secret that it owns, and the Lease of a launcher, as the API takes them. Values in, values out."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any

RUN, TRIAL, LAUNCHER = "steno.run", "steno.trial", "steno.launcher"
"""Labels, as containers have them. Of what no label can hold it is a digest; the annotation of the same name has it whole."""
ATTEMPT = "steno.attempt"
"""Label: which attempt at making it made this pod."""
QUEUE = "kueue.x-k8s.io/queue-name"
COMPONENT = {"app.kubernetes.io/part-of": "steno", "app.kubernetes.io/component": "sandbox"}
"""Labels by which a NetworkPolicy finds sandboxes."""
MAIN = "main"
"""The container that trials run in."""
SLEEP = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
SECRETS = "/run/steno/agent"
"""Where the Secret's values are files."""
_VOLUME = "steno-agent"
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

Manifest = dict[str, Any]

OURS = ("apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.ownerReferences", "spec.restartPolicy")
OURS_IN_MAIN = ("image", "command", "args")
"""What a template can't say, since a trial says it."""


def label(text: str) -> str:
    """`text`, or a digest of it where it can't be a label's value."""
    return text if _LABEL.fullmatch(text) else f"sha-{blake2b(text.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True)
class PodSandbox:
    """What one pod is to be. cpus, memory_mb, storage_mb: request and limit of each; None: not said. secret: name of the Secret
    that is mounted; None: there is none. deadline_s: after which the cluster ends it. template: the user's, for `merged`."""

    name: str
    image: str
    attempt: str
    marks: Mapping[str, str]
    deadline_s: int
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    secret: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    image_pull_secrets: tuple[str, ...] = ()
    queue: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


def pod(sandbox: PodSandbox) -> Manifest:
    amounts = {
        "cpu": None if sandbox.cpus is None else f"{round(sandbox.cpus * 1000)}m",
        "memory": None if sandbox.memory_mb is None else f"{sandbox.memory_mb}Mi",
        "ephemeral-storage": None if sandbox.storage_mb is None else f"{sandbox.storage_mb}Mi",
    }
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    container: Manifest = {
        "name": MAIN,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": given, "limits": dict(given)},
        "securityContext": {"runAsUser": 0, "allowPrivilegeEscalation": False},
    }
    spec: Manifest = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": sandbox.deadline_s,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    if sandbox.node_selector:
        spec["nodeSelector"] = dict(sandbox.node_selector)
    if sandbox.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in sandbox.image_pull_secrets]
    if sandbox.secret is not None:
        spec["volumes"] = [{"name": _VOLUME, "secret": {"secretName": sandbox.secret, "defaultMode": 0o444}}]
        container["volumeMounts"] = [{"name": _VOLUME, "mountPath": SECRETS, "readOnly": True}]
    found = merged({"metadata": {}, "spec": spec}, sandbox.template)
    labels = {**COMPONENT, **{name: label(text) for name, text in sandbox.marks.items()}, ATTEMPT: sandbox.attempt}
    if sandbox.queue is not None:
        labels[QUEUE] = sandbox.queue
    metadata = found["metadata"]
    metadata["name"] = sandbox.name
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    metadata["annotations"] = {**metadata.get("annotations", {}), **sandbox.marks}
    found["spec"]["restartPolicy"] = "Never"
    found["spec"]["containers"][0] |= {"image": sandbox.image, "command": SLEEP}
    return {"apiVersion": "v1", "kind": "Pod", **found}


def secret(name: str, values: Mapping[str, str], owner: Mapping[str, Any], marks: Mapping[str, str]) -> Manifest:
    """Args: owner: the pod's `metadata`: with the pod, the cluster removes it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": {**COMPONENT, **{key: label(text) for key, text in marks.items()}},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": owner["name"], "uid": owner["uid"]}],
        },
        "type": "Opaque",
        "immutable": True,
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()},
    }


def lease(launcher: str, lease_s: float, renewed: datetime, version: str | None = None) -> Manifest:
    """Says that a launcher lives. Args: renewed: in UTC. version: of the one that this is to replace."""
    metadata = {"name": lease_name(launcher), "labels": {**COMPONENT, LAUNCHER: label(launcher)}}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata if version is None else {**metadata, "resourceVersion": version},
        "spec": {
            "holderIdentity": launcher,
            "leaseDurationSeconds": max(1, round(lease_s)),
            "renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%f}Z",
        },
    }


def lease_name(launcher: str) -> str:
    return f"steno-{blake2b(launcher.encode(), digest_size=10).hexdigest()}"


def merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`: objects by their fields; of lists of objects with a name, the entries of one name, of `containers`
    the first with the first; other lists one after the other; else what `over` says."""
    if isinstance(base, dict) and isinstance(over, Mapping):
        found = dict(base)
        for name, value in over.items():
            together = _first_with_first if name == "containers" else merged
            found[name] = together(base[name], value) if name in base else value
        return found
    if isinstance(base, list) and isinstance(over, list):
        return _by_name(base, over)
    return over


def _first_with_first(base: list[Any], over: list[Any]) -> list[Any]:
    return [merged(base[0], over[0]), *over[1:]] if over else base


def _by_name(base: list[Any], over: list[Any]) -> list[Any]:
    names = [each.get("name") if isinstance(each, dict) else None for each in base]
    found = list(base)
    for each in over:
        name = each.get("name") if isinstance(each, dict) else None
        if name is not None and name in names:
            at = names.index(name)
            found[at] = merged(found[at], each)
        else:
            found.append(each)
    return found


def refused(template: Any) -> str | None:
    """What a template can't be, for people, the field's name first; None: it will do. Its other fields the cluster checks."""
    if not isinstance(template, Mapping):
        return f"got {type(template).__name__}, must be an object with metadata and spec"
    unknown = sorted(set(template) - {"apiVersion", "kind", "metadata", "spec"})
    if unknown:
        return f"{unknown[0]}: must be one of metadata, spec (and apiVersion, kind)"
    for name in ("metadata", "spec"):
        if not isinstance(template.get(name, {}), Mapping):
            return f"{name}: got {template[name]!r}, must be an object"
    containers = template.get("spec", {}).get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(each, Mapping) for each in containers):
        return f"spec.containers: got {containers!r}, must be a list of objects"
    for path in OURS[2:]:
        part, _, name = path.partition(".")
        if name in template.get(part, {}):
            return f"{path}: is set for each trial: leave it out"
    labels = template.get("metadata", {}).get("labels", {})
    if not isinstance(labels, Mapping):
        return f"metadata.labels: got {labels!r}, must be an object"
    for name in (RUN, TRIAL, LAUNCHER, ATTEMPT, *COMPONENT):
        if name in labels:
            return f"metadata.labels: {name}: is set for each trial: leave it out"
    for name in OURS_IN_MAIN if containers else ():
        if name in containers[0]:
            return f"spec.containers[0].{name}: is set for each trial: leave it out"
    if containers and containers[0].get("name", MAIN) != MAIN:
        return f"spec.containers[0].name: got {containers[0]['name']!r}, must be {MAIN!r} or left out"
    return None


def without_kind(template: Mapping[str, Any]) -> Manifest:
    """A template as `merged` takes it: what `kubectl create --dry-run -o yaml` adds is left out."""
    return {name: dict(template[name]) for name in ("metadata", "spec") if template.get(name)}
