"""A host that is not this machine, as far as sandboxes can tell: a network namespace with an address and a server of its own.

What stands for the internet: it is reached from this machine, so that a sandbox which does not reach it is held back. As root,
with iproute2.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.support.machine import network_namespace

PORT = 8080
_SERVE = f"import http.server as s; s.test(s.BaseHTTPRequestHandler, port={PORT}, bind='0.0.0.0')"


@contextlib.contextmanager
def far_host() -> Iterator[str]:
    """Its address, of those for documentation (RFC 5737)."""
    with network_namespace.made("far", "198.51.100") as network:
        command = ["ip", "netns", "exec", network.name, sys.executable, "-c", _SERVE]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                _until_it_answers(network.far)
                yield network.far
            finally:
                server.kill()


def _until_it_answers(address: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((address, PORT), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"{address} does not answer"
            time.sleep(0.05)
