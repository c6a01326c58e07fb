"""What can go wrong with a pod. `outcome.KINDS` says, by these names, how a trial ends by each."""

from __future__ import annotations


class PodError(Exception):
    """The words are for people, and name the pod."""


class ImageNotPulled(PodError):
    """The image is not to be had on the node, whatever is tried, or was not for as long as was waited."""


class PodNotStarted(PodError):
    """It found no node, or its container could not be made."""


class PodEvicted(PodError):
    """The cluster took it away: its node was short of something, was drained or lost, or a pod of more weight came."""


class PodDeadline(PodError):
    """It reached the age at which the cluster ends it."""


class PodOutOfMemory(PodError):
    """Its container needed more memory than its limit."""


class PodEnded(PodError):
    """The main process of its container ended. Only a process inside the pod can have ended it."""


class PodGone(PodError):
    """Somebody deleted it."""


class StreamBroken(PodError):
    """A connection into a pod that still runs."""


class ApiRefused(PodError):
    """The cluster's API said no: what was asked is not allowed, or not valid."""


class QuotaExceeded(ApiRefused):
    """A ResourceQuota of the namespace has no room now. never: it has not even for this alone."""

    def __init__(self, words: str, *, never: bool = False) -> None:
        super().__init__(words)
        self.never = never


class ApiUnavailable(PodError):
    """The cluster's API gave no answer, or none that helps, for as long as was waited."""


ERRORS = {
    each.__name__: each
    for each in (ImageNotPulled, PodNotStarted, PodEvicted, PodDeadline, PodOutOfMemory, PodEnded, PodGone)
}
"""Those that are read off a pod's status."""
