"""Functions of the user's that settings name as `FILE.py:function`: a script of the worker, a reward of the rollouts,
an objective or an estimator of the trainer."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from steno.contracts.errors import ConfigError


def names_function(value: str) -> bool:
    """Whether a setting that also takes names of ours is given a `FILE.py:function`."""
    file, _, function = value.rpartition(":")
    return file.endswith(".py") and function.isidentifier()


_IMPORTED: dict[tuple[Path, bytes], ModuleType] = {}
"""By file, and digest of its text."""


def load_function(where: str, field: str) -> Callable[..., Any]:
    """As `load_with_text`, each time anew."""
    return load_with_text(where, field, once=False)[0]


def load_with_text(where: str, field: str, *, once: bool) -> tuple[Callable[..., Any], bytes]:
    """Import the file and find the function; the file's folder is importable from then on. Returns also
    the bytes that were imported, since the file may change.

    Args: where: `FILE.py:function`. field: the setting that says so; errors begin with it. once: a file that was imported so, and
        has the same text still, is not imported again.
    Raises: ConfigError: not of this form, no such file or function, or a file that can't be imported.
    """

    def refused(what: str) -> ConfigError:
        return ConfigError(f"{field}: {what}", field=field)

    file, colon, name = where.rpartition(":")
    if not colon or not file or not name:
        raise refused(f"got {where!r}, must be FILE.py:function")
    path = Path(file).expanduser()
    if not path.is_file():
        raise refused(f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(f"steno_{field}_{path.stem}", path)
    if spec is None:
        raise refused(f"{path} is not a Python file")
    try:
        text = path.read_bytes()
        key = path.resolve(), blake2b(text, digest_size=16).digest()
        module = _IMPORTED.get(key) if once else None
        if module is None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up there
            if str(path.parent.resolve()) not in sys.path:
                sys.path.append(str(path.parent.resolve()))
            # Compile these bytes: Python's .pyc cache tells files apart by size and second only.
            exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise refused(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    if once:
        _IMPORTED[key] = module
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise refused(f"{path} has no function {name!r}; it has {', '.join(found) or 'none'}")
    return function, text
