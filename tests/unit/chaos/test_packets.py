"""Packets that the suite drops do not arrive, nor does a connection come about, and afterwards all is as before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CAP_SYS_ADMIN = 21
CODE = """
import socket
from tests.chaos.system import packets

packets.enter()
if not packets.inside():
    raise SystemExit("relays stand in")
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
client = socket.create_connection(("127.0.0.1", port))
there, _ = server.accept()
with packets.lost(port, "deaf"):
    client.sendall(b"a")
    assert there.recv(1) == b"a", "only what the side that dialled would hear is lost"
    there.sendall(b"b")
    client.settimeout(0.5)
    try:
        raise SystemExit(f"heard {client.recv(1)}")
    except TimeoutError:
        pass
with packets.lost(port, "drop"):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5)
        raise SystemExit("connected")
    except TimeoutError:
        pass
client.settimeout(30)
assert client.recv(1) == b"b", "it is sent again"
socket.create_connection(("127.0.0.1", port), timeout=30)
"""


STATUS = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
MAY_ADMINISTER = os.getuid() == 0 and bool(int(STATUS["CapEff"], 16) >> CAP_SYS_ADMIN & 1)
STANDS_IN = [(0, ""), (1, "relays stand in")]


def test_what_is_dropped_does_not_arrive_until_it_is_sent_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    # In a container without privileges there is no namespace to be had, and the suite says so (`packets: relays`).
    allowed = [(0, "")] if MAY_ADMINISTER and all(map(shutil.which, ("unshare", "ip", "iptables"))) else STANDS_IN
    assert (done.returncode, done.stderr.strip()) in allowed
