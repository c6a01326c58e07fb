"""The nodes of a trainer meet by the variables that the chart gives them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.helm.support import environment, pods, render
from tests.support.programs.ports import free_port
from tests.support.programs.processes import SLOW_S, until
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.helm


@pytest.fixture(scope="module")
def given() -> dict[str, str]:
    pod = environment(pods(render("training"))["run-steno-trainer"])
    return {"PATH": os.environ["PATH"]} | {name: pod[name] for name in pod if not name.startswith("STENO_")}


@contextlib.contextmanager
def node(given: dict[str, str], port: int, address: str, *, is_host: bool) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.helm.rendezvous_node", str(port), address, str(int(is_host))]
    child = subprocess.Popen(command, cwd=ROOT, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
def test_a_node_that_is_new_meets_one_that_stayed(given: dict[str, str]) -> None:
    """torch publishes the first rank's address in its node's first round only. The new node waited `read_timeout` for it."""
    port = free_port()
    with node(given, port, "127.0.0.1", is_host=True) as first:
        with node(given, port, "127.0.0.2", is_host=False) as second:
            before = meet(first, second)
            second.kill()  # it is missed after three heartbeats, 15 s
        with node(given, port, "127.0.0.2", is_host=False) as new:
            after = meet(first, new)
    for (one, its_port), (other, others_port) in (before, after):
        assert (one, other) == ("0", "1") and its_port == others_port


@contextlib.contextmanager
def pod(given: dict[str, str], port: int, number: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node's torchrun as process 1 of its namespace, as a container has it: it hears of no signal without a handler."""
    here = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_LOCAL_ADDR": f"127.0.0.{number + 1}"}
    here |= {"PET_RDZV_CONF": f"{given['PET_RDZV_CONF']},is_host={int(number == 0)}"}
    here |= {"HOME": str(folder), "TMPDIR": str(folder)}
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    command = [*apart, sys.executable, "-m", "steno_cli.torchrun", "-m", "steno", "train"]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, cwd=ROOT, env=given | here, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def asked_to_end(pod: subprocess.Popen[bytes]) -> int:
    """Returns: its exit code, after SIGTERM."""
    [torchrun] = psutil.Process(pod.pid).children()
    torchrun.terminate()
    return pod.wait(SLOW_S)


@pytest.mark.timeout(900)
def test_a_first_node_that_waits_for_the_second_ends_when_it_is_asked_to(given: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    with pod(given, port, 0, tmp_path) as first, until(lambda: connected(port), (tmp_path / "log").read_text):
        assert asked_to_end(first) == 143


def connected(port: int) -> socket.socket | None:
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection(("127.0.0.1", port))
    return None


@pytest.mark.timeout(900)
def test_a_second_node_that_waits_for_the_first_ends_when_it_is_asked_to(given: dict[str, str], tmp_path: Path) -> None:
    """It waits inside torch's C++ code, where Python calls no handler."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(SLOW_S)
        with pod(given, silent.getsockname()[1], 1, tmp_path) as second:
            asks, _ = silent.accept()
            with asks:
                assert asked_to_end(second) == 143
