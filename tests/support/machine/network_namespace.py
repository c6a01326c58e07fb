"""A network namespace with an address of its own, joined to this machine by a pair of interfaces. As root, with iproute2."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 64
"""At a time, of one kind: each has four addresses."""


@dataclass(frozen=True)
class Network:
    """near: this machine's address in it, by which it reaches all that this machine does. far: its own."""

    name: str
    near: str
    far: str


@contextlib.contextmanager
def made(kind: str, net: str) -> Iterator[Network]:
    """Args: kind: what it is named after, at most eight letters. net: the first three numbers of its addresses, one of the nets
    for documentation (RFC 5737)."""
    number, lock = _free(kind)
    near, far = f"{kind}-near{number}", f"{kind}-far{number}"
    found = Network(f"{kind}-{number}", f"{net}.{4 * number + 1}", f"{net}.{4 * number + 2}")
    _remove(near, found.name)  # of a run that was killed
    try:
        for words in (
            f"netns add {found.name}",
            f"link add {near} type veth peer name {far} netns {found.name}",
            f"addr add {found.near}/30 dev {near}",
            f"link set {near} up",
            f"-n {found.name} link set lo up",
            f"-n {found.name} addr add {found.far}/30 dev {far}",
            f"-n {found.name} link set {far} up",
            f"-n {found.name} route add default via {found.near}",
        ):
            assert _ip(*words.split()), words
        yield found
    finally:
        _remove(near, found.name)
        os.close(lock)


def _free(kind: str) -> tuple[int, int]:
    """A number that no process of tests has, and the lock that says so, which ends with its process."""
    for number in range(MOST):
        lock = os.open(
            f"{tempfile.gettempdir()}/steno-network-{kind}-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, lock
        os.close(lock)
    raise RuntimeError(f"all {MOST} networks {kind}-… are those of processes of tests")


def _remove(near: str, name: str) -> None:
    _ip("link", "delete", near)
    _ip("netns", "delete", name)


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0
