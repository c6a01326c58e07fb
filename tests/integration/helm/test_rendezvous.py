"""The nodes of a trainer meet by the variables that the chart gives them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.helm.support import environment, pods, render
from tests.support.ports import free_port
from tests.support.stack import ROOT

pytestmark = pytest.mark.helm


@contextlib.contextmanager
def node(port: int, address: str, *, is_host: bool) -> Iterator[subprocess.Popen[str]]:
    pod = environment(pods(render("training"))["run-steno-trainer"])
    given = {name: value for name, value in pod.items() if not name.startswith("STENO_")}
    command = [sys.executable, "-m", "tests.integration.helm.rendezvous_node", str(port), address, str(int(is_host))]
    child = subprocess.Popen(
        command, cwd=ROOT, env={"PATH": os.environ["PATH"], **given}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def meet(*nodes: subprocess.Popen[str]) -> list[list[str]]:
    """What each said: its number, and the first rank's port."""
    for one in nodes:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    return [one.stdout.readline().split() for one in nodes if one.stdout is not None]


@pytest.mark.timeout(300)
def test_a_node_that_is_new_meets_one_that_stayed() -> None:
    """torch keeps where the first rank is found from an earlier meeting, and told it to nobody: the new node waited for
    `read_timeout`, and the one that stayed for it."""
    port = free_port()
    with node(port, "127.0.0.1", is_host=True) as first:
        with node(port, "127.0.0.2", is_host=False) as second:
            before = meet(first, second)
            second.kill()  # it is missed after three heartbeats, 15 s
        with node(port, "127.0.0.2", is_host=False) as new:
            after = meet(first, new)
    for (one, its_port), (other, others_port) in (before, after):
        assert (one, other) == ("0", "1") and its_port == others_port
