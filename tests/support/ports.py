"""Ports for servers that are told theirs, and keep it when they are started again."""

from __future__ import annotations

import random
import socket

BELOW = 32768
"""From here on the kernel takes the ports of outgoing connections (Linux): one may be gone a moment after it was free."""

_random = random.Random()  # of its own: tests seed the global one, and several run at a time


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that no connection will take."""
    while True:
        port = _random.randrange(10240, BELOW)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
