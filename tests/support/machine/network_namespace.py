"""A network namespace with an address of its own, joined to this machine by a pair of interfaces. As root, with iproute2."""

from __future__ import annotations

import contextlib
import subprocess
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
    number = next(each for each in range(MOST) if _ip("netns", "add", f"{kind}-{each}"))
    near, far = f"{kind}-near{number}", f"{kind}-far{number}"
    found = Network(f"{kind}-{number}", f"{net}.{4 * number + 1}", f"{net}.{4 * number + 2}")
    try:
        for words in (
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
        _ip("link", "delete", near)
        _ip("netns", "delete", found.name)


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0
