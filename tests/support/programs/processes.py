"""Programs as processes of their own: started with their output in a file, waited for, ended by pid."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.programs import forked
from tests.support.programs.forked import Started
from tests.support.programs.stack import ROOT

SLOW_S = 300.0
"""Seconds that anything may take on a machine that others use too."""


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, cwd: Path = ROOT
) -> Iterator[Started]:
    """A program, ended by SIGTERM when the block is left, and by SIGKILL if that takes a minute.

    Args: environment: beside that of the tests.
    """
    with log.open("ab") as out:
        child = forked.start(command, {**os.environ, **(environment or {})}, cwd, out)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def until(condition: Callable[[], Any], what: str | Callable[[], str] = "", within_s: float = SLOW_S) -> Any:
    """Wait for the first true value of `condition` and return it; an error of httpx's transport counts as false.

    Args: what: says what did not happen: a text, or a function that gives it. Raises: AssertionError: with `what`.
    """
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := condition():
                return found
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.02)


def until_it_answers(child: Started, log: Path, condition: Callable[[], Any]) -> None:
    """As `until`; fails with the program's log, also once it has ended."""

    def answers() -> Any:
        assert child.poll() is None, f"{child.args!r} ended with {child.returncode}: {log.read_text()[-4000:]}"
        return condition()

    until(answers, lambda: log.read_text()[-4000:])
