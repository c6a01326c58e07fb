"""Ports that tests tell their servers: no two processes of tests are told the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ports
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


def test_none_is_one_that_the_kernel_gives_to_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "OUTGOING", tmp_path / "range")
    ports.OUTGOING.write_text(f"{FROM + BLOCK}\t60999\n")
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ports._block() == range(FROM, FROM + BLOCK)
    with pytest.raises(RuntimeError, match="all 1 blocks"):
        ports._block()
    ports.OUTGOING.write_text("1024\t65535\n")
    with pytest.raises(RuntimeError, match=r"range: got first port 1024, tests need at least 10496"):
        ports._block()


def test_one_that_somebody_listens_on_is_passed_over() -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        assert taken not in {free_port() for _ in range(BLOCK)}
