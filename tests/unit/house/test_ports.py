"""Ports that tests tell their servers: no two processes of tests are told the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.support.programs.ports import BELOW, BLOCK, FROM, free_port
from tests.support.sources import ROOT

MANY = f"from tests.support.programs.ports import free_port; print(*(free_port() for _ in range({BLOCK})), flush=True); input()"


def test_processes_of_tests_are_told_ports_of_their_own() -> None:
    mine = {free_port() for _ in range(BLOCK)}
    command = [sys.executable, "-c", MANY]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        other.communicate("\n")
    assert len(mine) > BLOCK / 2 < len(theirs) and not mine & theirs
    assert min(mine | theirs) >= FROM and max(mine | theirs) < BELOW


def test_a_fork_is_told_others_than_the_process_that_it_is_of() -> None:
    mine = {free_port() for _ in range(BLOCK)}
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(free_port()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 16)) not in mine
    os.close(read)
    os.close(write)


def test_one_that_somebody_listens_on_is_passed_over() -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        assert taken not in {free_port() for _ in range(BLOCK)}
