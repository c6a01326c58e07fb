"""What the proxy's end of the relay is set to, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """The settings of the proxy's end of the relay.

    heartbeat_s: seconds between heartbeats, either way.
    silence_s: a socket on which nothing came for so long is closed.
    resume_grace_s: how long a worker without a socket keeps its streams; then they are lost.
    max_packet_bytes: the largest message either way; bounds the largest request.
    window_tokens: tokens of one stream that may be on the way or unread.
    max_waiting: turns that may wait for a place on a worker; more are refused with 429.
    queue_s: how long each of them may wait.
    worker_key: what workers must show; "" lets any in (loopback only: checked where the listener is made).
    """

    heartbeat_s: float = 5.0
    silence_s: float = 20.0
    resume_grace_s: float = 30.0
    max_packet_bytes: int = 64 * 1024 * 1024
    window_tokens: int = 4096
    max_waiting: int = 1024
    queue_s: float = 60.0
    worker_key: str = ""


class RelayCounts:
    """Totals since the start. late_tokens: of streams that had been cancelled; no record holds them (I4). channels: by what
    became of them; the streams of one that is lost go on elsewhere."""

    def __init__(self) -> None:
        self.tokens = self.late_tokens = 0
        self.channels = dict.fromkeys(("new", "resumed", "lost", "refused", "protocol_error"), 0)
        self._told: Counter[str] = Counter()

    def grown(self) -> dict[str, int]:
        """By how much each total has grown since this was asked last: `tokens`, `late_tokens`, and those of `channels`."""
        now = Counter({"tokens": self.tokens, "late_tokens": self.late_tokens, **self.channels})
        grown, self._told = {name: total - self._told[name] for name, total in now.items()}, now
        return grown
