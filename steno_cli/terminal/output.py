"""Output of the command line: results on stdout, everything else on stderr, a failure as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


def require_modules(*modules: str) -> None:
    """Before anything is started: what a command's other processes will import. Raises: ModuleNotFoundError: one is missing."""
    if name := missing(modules):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Expected failures become one line on stderr: exit code 2 for what the user can correct, 3 where another trainer has the
    run, 1 for the rest.

    A surprise keeps its traceback: it is a bug, and the traceback is what a report needs.
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
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> None:
    console(stderr=True).print("[bold red]error:[/]", end=" ")
    console(stderr=True).print(message, markup=False, soft_wrap=True)
    sys.exit(code)
