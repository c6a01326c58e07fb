"""Packets that are lost. A relay can't play this: the kernel has acknowledged to the sender what a relay then drops.

The suite runs in a network namespace of its own, so that its rules of the packet filter touch nothing else. Where none can be had
(`inside()` says), relays stand in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

INSIDE = "CHAOS_NAMESPACE"
LOSS = 0.3
WAYS = {
    # what: (directions, of the port that listens; share of packets that is lost)
    "drop": (("--dport", "--sport"), 1.0),
    "deaf": (("--sport",), 1.0),
    "loss": (("--dport", "--sport"), LOSS),
}


def inside() -> bool:
    return INSIDE in os.environ


def enter() -> None:
    """Run this program again, in namespaces of its own for network and mounts. Returns where none can be had."""
    if inside() or not all(map(shutil.which, ("unshare", "ip", "iptables"))):
        return
    apart = ["unshare", "--net", "--mount"]
    for command in (apart, [*apart, "--map-root-user"]):
        trial = [*command, "sh", "-c", "ip link set lo up && iptables -w -A INPUT -p tcp --dport 1 -j DROP"]
        if subprocess.run(trial, capture_output=True).returncode == 0:
            os.environ[INSIDE] = "1"
            begin = 'ip link set lo up && exec "$@"'
            os.execvp(command[0], [*command, "sh", "-c", begin, "sh", *sys.orig_argv])


@contextlib.contextmanager
def lost(port: int, what: str) -> Iterator[None]:
    """Lose packets while the block runs. Args: port: on which a server of this host listens. what: `drop`: all packets in both
    directions, also of new connections; `deaf`: only those from the server to its client; `loss`: some, in both directions."""
    directions, share = WAYS[what]
    some = [] if share == 1.0 else ["-m", "statistic", "--mode", "random", "--probability", str(share)]
    rules = [["INPUT", "-p", "tcp", direction, str(port), *some, "-j", "DROP"] for direction in directions]
    try:
        for rule in rules:
            _iptables("-A", *rule)
        yield
    finally:
        for rule in rules:
            _iptables("-D", *rule)


def _iptables(*words: str) -> None:
    done: Sequence[str] = ["iptables", "--wait", *words]
    result = subprocess.run(done, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(done)}: {result.stderr}")
