"""What a pod's status says of a sandbox. Values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from .errors import ERRORS, PodError
from .manifest import MAIN

_NO_IMAGE = frozenset("InvalidImageName ErrImageNeverPull SignatureValidationFailed".split())
"""Reasons that no other try changes."""
_NOT_PULLED = frozenset("ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable".split())
"""Reasons after which a kubelet tries again, without an end and less and less often."""
_NO_CONTAINER = frozenset("CreateContainerConfigError CreateContainerError RunContainerError StartError".split())
_EVICTED = frozenset("Evicted NodeLost NodeShutdown Shutdown Terminated Preempting NodeAffinity Preempted".split())
_DISRUPTED = ("DisruptionTarget", "TerminationTarget")
"""Conditions of a pod that is taken away: Kubernetes' own, and Kueue's."""
_SAID = 400
"""Most characters of what the cluster says."""


@dataclass(frozen=True)
class PodState:
    """error: name of the error that ended the pod; None: it is not over. words: why, for people. waits: what it waits for, as
    long as it does not run. unpulled: its image could not be pulled yet, and is tried again; `words` says why. queued: a queue
    holds it back, and its time limit to start does not run."""

    uid: str
    running: bool = False
    error: str | None = None
    words: str = ""
    waits: str = ""
    unpulled: bool = False
    queued: bool = False

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        return cls(**found)

    def raised(self) -> PodError | None:
        return None if self.error is None else ERRORS[self.error](self.words)


def state_of(pod: Mapping[str, Any], *, deleted: bool = False) -> PodState:
    """Args: pod: as the API gives it. deleted: it is there no more."""
    metadata, status = pod["metadata"], pod.get("status", {})
    node = pod.get("spec", {}).get("nodeName")
    who = f"pod {metadata['name']}" + (f" on node {node}" if node else "")
    main: Mapping[str, Any] = next(
        (each for each in status.get("containerStatuses", []) if each.get("name") == MAIN), {}
    )
    condition = {each.get("type"): each for each in status.get("conditions", []) if isinstance(each, Mapping)}

    def over(error: str, what: str, *said: str | None) -> PodState:
        return PodState(metadata["uid"], error=error, words=_line(f"{who} {what}", *said))

    ends = deleted or metadata.get("deletionTimestamp") or status.get("phase") == "Failed"
    disrupted = next((each for name in _DISRUPTED if (each := condition.get(name, {})).get("status") == "True"), None)
    if ends and disrupted is not None:
        return over("PodEvicted", "was evicted", disrupted.get("reason"), disrupted.get("message"))
    if status.get("phase") in ("Failed", "Succeeded"):
        return _ended(status, main, over)
    if deleted or metadata.get("deletionTimestamp"):
        return over("PodGone", "was deleted", "not by these rollouts")
    state = main.get("state", {})
    if "terminated" in state:
        return _ended(status, main, over)
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "")
    image = pod.get("spec", {}).get("containers", [{}])[0].get("image")
    if reason in _NO_IMAGE:
        return over("ImageNotPulled", f"has no image {image}", reason, waiting.get("message"))
    if reason in _NOT_PULLED:
        words = _line(f"{who} has no image {image}", reason, waiting.get("message"))
        return PodState(metadata["uid"], unpulled=True, words=words, waits=f"its image {image} ({reason})")
    if reason in _NO_CONTAINER:
        return over("PodNotStarted", "could not make its container", reason, waiting.get("message"))
    if "running" in state and status.get("phase") == "Running":
        return PodState(metadata["uid"], running=True)
    scheduled = condition.get("PodScheduled", {})
    queued = scheduled.get("reason") == "SchedulingGated"
    if scheduled.get("status") == "False":
        said = _line(scheduled.get("reason"), scheduled.get("message"))
        return PodState(metadata["uid"], waits=f"a node ({said})", queued=queued)
    return PodState(metadata["uid"], waits=f"its container ({reason or 'no word of it yet'})")


def _ended(status: Mapping[str, Any], main: Mapping[str, Any], over: Callable[..., PodState]) -> PodState:
    reason, message = status.get("reason"), status.get("message")
    ended = main.get("state", {}).get("terminated", {})
    if reason == "DeadlineExceeded":
        return over("PodDeadline", "reached its deadline_s (--environment-options)", message)
    if ended.get("reason") == "OOMKilled":
        return over("PodOutOfMemory", "needed more memory than its limit", "OOMKilled")
    if reason in _EVICTED:
        return over("PodEvicted", "was evicted", reason, message)
    if reason:
        return over("PodNotStarted", "was refused by its node", reason, message)
    code = ended.get("exitCode")
    return over("PodEnded", "ended" + ("" if code is None else f" with exit code {code}"), ended.get("message"))


def _line(first: str | None, *more: str | None) -> str:
    return ": ".join(" ".join(each.split())[:_SAID] for each in (first, *more) if each)
