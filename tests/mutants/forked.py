"""pytest on a copy of the checkout, in a fork of this process: what is not the project's is imported once."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

OURS = (
    "steno",
    "steno_cli",
    "steno_proxy",
    "steno_adapters",
    "steno_rollouts",
    "steno_trainer",
    "steno_worker",
    "tests",
)
THEIRS = (
    "pytest",
    "hypothesis",
    "msgspec",
    "httpx",
    "fastapi",
    "uvicorn",
    "redis.asyncio",
    "torch",
    "transformers",
    "openai",
)


def import_theirs() -> None:
    for name in THEIRS:
        importlib.import_module(name)


def run_tests(copy: Path, tests: tuple[str, ...], limit_s: float) -> tuple[int | None, str]:
    """pytest's exit code, None: it took longer than limit_s; and what it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _be_pytest(copy, tests, said.fileno())
        code = _wait(child, limit_s)
        said.seek(0)
        return code, said.read()


def _be_pytest(copy: Path, tests: tuple[str, ...], to: int) -> None:
    code = 70
    try:
        os.setsid()
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.chdir(copy)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[0] = str(copy)
        importlib.invalidate_caches()
        pytest = importlib.import_module("pytest")
        code = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(child: int, limit_s: float) -> int | None:
    """Its exit code. What it started ends with it."""
    until = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        late = time.monotonic() > until
        if ended or late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not ended:
                os.waitpid(child, 0)
            return None if not ended else os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
