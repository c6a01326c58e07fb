"""Output of the command line: results on stdout, everything else on stderr, a failure as one line."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from steno.config.extras import how_to_install, missing
from steno.contracts.errors import (
    CannotListen,
    ConfigError,
    Forbidden,
    NotFound,
    StenoError,
    Superseded,
    TrainerAlive,
    Unauthorized,
)

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_OTHER_TRAINER = 3
"""Of `steno train`: another trainer has the run. Started again it would only be refused again."""

EXTRAS = {
    "fastapi": "proxy",
    "uvicorn": "proxy",
    "uvloop": "proxy",
    "redis": "proxy",
    "zstandard": "proxy",
    "torch": "worker",
    "transformers": "worker",
    "tokenizers": "worker",
    "safetensors": "worker",
    "llguidance": "worker",
    "jinja2": "worker",
    "websockets": "worker",
    "vllm": "vllm",
    "deepspeed": "trainer",
    "peft": "trainer",
    "pyarrow": "export",
    "openai": "demo",
    "matplotlib": "demo-train",
    "litellm": "litellm",
    "aiohttp": "litellm",
}
"""Module -> the extra of the distribution that brings it."""
NO_CONTROL_PLANE = "; where a proxy has a --control-port, that one is meant"
"""On a port that is the agents' alone, a proxy says of the control plane only that it is not there."""


def console(*, stderr: bool = False) -> Console:
    """Made anew, since tests and pagers replace the streams."""
    return Console(stderr=stderr, highlight=False)


def write_utf8() -> None:
    """Write standard output as UTF-8 in every locale, as readers of JSON expect. A terminal keeps its own encoding, and is shown
    a ? for a character that it lacks, in place of an error."""
    if not isinstance(sys.stdout, TextIOWrapper):  # closed, or a caller's own
        return
    if sys.stdout.isatty():
        sys.stdout.reconfigure(errors="replace")
    else:
        sys.stdout.reconfigure(encoding="utf-8", errors=sys.stdout.errors)


def require_modules(*modules: str) -> None:
    """Before anything is started: what a command's other processes will import. Raises: ModuleNotFoundError: one is missing."""
    if name := missing(modules):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def named_by(option: str, path: Path) -> Iterator[None]:
    """Around what is done with the file or folder that an option names, and around nothing else: there an OSError is no surprise.

    Raises: ConfigError: the option, the path and the reason.
    """
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"{option}: {path}: {why}") from None


def check_can_be_written(option: str, path: Path) -> None:
    """Before minutes of work: whether something can be made at `path`, in a folder that is there or is made then.

    Raises: ConfigError.
    """
    with named_by(option, path):
        there = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        if path.is_file():
            path.open("ab").close()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Expected failures become one line on stderr: exit code 2 for what the user can correct, 3 where another trainer has the
    run, 1 for the rest.

    A surprise keeps its traceback: it is a bug, and the traceback is what a report needs. So does an OSError, except for a file
    that this user may not use: its path says what to correct. Where the option is known, `named_by` names that too.
    """
    try:
        yield
    except CannotListen as error:
        _fail(error.message, EXIT_FAILURE)
    except ConfigError as error:
        _fail(error.message, EXIT_USAGE)
    except (Superseded, TrainerAlive) as error:
        _fail(error.message, EXIT_OTHER_TRAINER)
    except (Unauthorized, Forbidden) as error:
        _fail(f"{error.message}; give the admin key by --key-file or STENO_ADMIN_KEY", EXIT_FAILURE)
    except StenoError as error:
        nothing = isinstance(error, NotFound) and error.message.startswith("Not Found")
        _fail(error.message + (NO_CONTROL_PLANE if nothing else ""), EXIT_FAILURE)
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top not in EXTRAS:
            raise
        _fail(f"this needs {top}: {how_to_install(EXTRAS[top])}", EXIT_USAGE)
    except PermissionError as error:
        if not isinstance(error.filename, str):
            raise
        _fail(f"{error.filename}: {error.strerror}", EXIT_FAILURE)  # it may be so for a while: a server of files, say
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> None:
    console(stderr=True).print("[bold red]error:[/]", end=" ")
    console(stderr=True).print(message, markup=False, soft_wrap=True)
    sys.exit(code)
