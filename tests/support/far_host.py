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

PORT = 8080
_SERVE = f"import http.server as s; s.test(s.BaseHTTPRequestHandler, port={PORT}, bind='0.0.0.0')"


@contextlib.contextmanager
def far_host() -> Iterator[str]:
    """Its address, of those for documentation (RFC 5737)."""
    number = next(each for each in range(64) if _made("netns", "add", f"far-{each}"))  # others may have one at a time
    name, near, far = f"far-{number}", f"near{number}", f"far{number}"
    here, there = (f"198.51.100.{4 * number + end}" for end in (1, 2))
    try:
        for words in (
            f"link add {near} type veth peer name {far} netns {name}",
            f"addr add {here}/30 dev {near}",
            f"link set {near} up",
            f"-n {name} addr add {there}/30 dev {far}",
            f"-n {name} link set {far} up",
            f"-n {name} route add default via {here}",
        ):
            assert _made(*words.split()), words
        command = ["ip", "netns", "exec", name, sys.executable, "-c", _SERVE]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                _until_it_answers(there)
                yield there
            finally:
                server.kill()
    finally:
        _made("link", "delete", near)
        _made("netns", "delete", name)


def _until_it_answers(address: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((address, PORT), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"{address} does not answer"
            time.sleep(0.05)


def _made(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0
