"""Ports for servers that are told theirs, and keep it when they are started again."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FROM, BELOW = 10240, 32768
"""From BELOW on, or earlier where it is set so, the kernel takes the ports of outgoing connections (Linux): one may be gone a
moment after it was free."""
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
BLOCK = 256
"""Ports that one process of tests has to itself, until it ends: between being told its port and listening on it a server takes
a second, in which another process would find it free."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, that no connection will take, and that no other process of tests is told."""
    while True:
        port = next(_ports(os.getpid()))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@functools.cache
def _ports(pid: int) -> Iterator[int]:
    """One after the other, again and again: what was told is told again as late as can be. pid: a fork has ports of its own."""
    return itertools.cycle(_block())


def _block() -> range:
    """The first that no process holds a lock on. The lock is left open on purpose: it ends with this process."""
    folder = Path(tempfile.gettempdir()) / f"steno-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    below = min(BELOW, int(OUTGOING.read_text().split()[0])) if OUTGOING.exists() else BELOW
    if below - FROM < BLOCK:
        raise RuntimeError(
            f"{OUTGOING}: got first port {below}, tests need at least {FROM + BLOCK}: they listen from {FROM} on"
        )
    for first in range(FROM, below, BLOCK):
        lock = os.open(folder / str(first), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return range(first, min(first + BLOCK, below))
    raise RuntimeError(f"all {-(-(below - FROM) // BLOCK)} blocks of ports are held by processes of tests")
