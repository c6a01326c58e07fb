"""What scripts/lib.sh says of missing system packages, and while it installs: with an apt and a Python of the test's own."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import ROOT

NO_VENV = 'case "$2" in *ensurepip*) exit 1 ;; *-venv*) echo python3.12-venv ;; esac'
OTHERS = dict.fromkeys(("python3.12", "python3.13", "python"), "exit 1")
"""That the machine may have: none of a supported version."""


def run(folder: Path, command: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """A command with scripts/lib.sh, in an empty folder; `programs`: bodies of shell scripts, found before the system's."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in programs.items():
        program = folder / "bin" / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    (folder / "requirements").mkdir(exist_ok=True)
    (folder / "requirements/runtime.txt").write_text("torch==9.9\n")
    script = f'set -euo pipefail; . "{ROOT}/scripts/lib.sh"; {command}'
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env={"PATH": f"{folder}/bin:/usr/bin:/bin", "STENO_TEST_PYTHON": "python3"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_all_that_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    asked = "need_commands no-such-1=one sh=dash no-such-2=two"
    refused = run(tmp_path, asked, id="echo 1000", python3=NO_VENV, **OTHERS)
    assert refused.returncode != 0
    [line] = refused.stderr.splitlines()
    assert "missing: one two python3.12-venv. Debian and Ubuntu: sudo apt install one two python3.12-venv" in line


def test_a_python_that_can_make_environments_is_taken_before_one_that_cannot(tmp_path: Path) -> None:
    others = {**OTHERS, "python": "exit 0"}
    found = run(tmp_path, "need_commands sh=dash; find_python", id="echo 1000", python3=NO_VENV, **others)
    assert (found.returncode, found.stderr) == (0, "") and found.stdout == f"{tmp_path}/bin/python\n"


def test_nothing_is_asked_for_where_all_is_there(tmp_path: Path) -> None:
    found = run(tmp_path, "need_commands sh=dash", id="echo 1000", python3="exit 0")
    assert found.returncode == 0 and found.stderr == ""


def test_packages_that_apt_could_not_install_are_named_below_its_reason(tmp_path: Path) -> None:
    failing = 'case "$1" in install) echo "dpkg: error processing package one"; exit 100 ;; esac'
    refused = run(tmp_path, "need_packages one two", id="echo 0", apt_get=failing)
    assert refused.returncode != 0
    *_, why, last = refused.stderr.splitlines()
    assert why == "dpkg: error processing package one"
    assert "apt-get could not install one two" in last and "apt-get install one two" in last


def test_a_good_install_says_only_that_it_installs(tmp_path: Path) -> None:
    noisy = 'case "$1" in install) echo noise; echo more >&2 ;; esac'
    done = run(tmp_path, "need_packages one", id="echo 0", apt_get=noisy)
    assert (done.returncode, done.stdout) == (0, "")
    [line] = done.stderr.splitlines()
    assert "installing one" in line


def test_on_a_terminal_the_seconds_of_a_silent_command_are_counted() -> None:
    ours, theirs = pty.openpty()
    script = (
        f'set -euo pipefail; TORCH_VERSION=; . "{ROOT}/scripts/lib.sh"; counting sh -c "sleep 4.5; exit 3" || echo "$?"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True, check=False
    )
    os.close(theirs)
    said = b"".join(_until_closed(ours)).decode()
    os.close(ours)
    assert done.stdout == "3\n", "the command's own exit code"
    assert re.search(r"\r    [1-9]\d* s", said) and said.endswith("\r\033[K"), "and nothing of it stays"


def _until_closed(terminal: int) -> Iterator[bytes]:
    """All that was written to its other end. What was written last comes a moment later, also after that was closed."""
    with contextlib.suppress(OSError):  # EIO: it is closed
        while piece := os.read(terminal, 10_000):
            yield piece


def test_elsewhere_nothing_is_counted(tmp_path: Path) -> None:
    done = run(tmp_path, "counting sleep 1.5")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_the_script_though_what_it_runs_ends_as_if_it_had_failed() -> None:
    waits = 'trap "exit 1" INT; echo ready; while :; do sleep 0.05; done'
    script = f"TORCH_VERSION=; . \"{ROOT}/scripts/lib.sh\"; if sh -c '{waits}'; then :; fi; echo went on"
    child = subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    os.killpg(child.pid, signal.SIGINT)
    assert child.communicate(timeout=30)[0] == ""
    assert child.returncode == 130
