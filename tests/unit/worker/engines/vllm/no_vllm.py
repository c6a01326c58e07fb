"""One module of our engine on vLLM, where vLLM is not installed: the modules around it are empty."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(Exception):
    """Made of any arguments."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args)


class _Empty(ModuleType):
    """A module that has a class of every name that is imported from it."""

    __path__: list[str] = []  # noqa: RUF012 (a package)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (_Anything,), {}))
        return getattr(self, name)


class _AllBut(MetaPathFinder, Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        beside = name.startswith("steno_worker.engines.vllm.") and name != self._name
        return ModuleSpec(name, self, is_package=True) if beside or name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _taken_out() -> dict[str, ModuleType]:
    """What is imported of vLLM, and of our engine on it."""
    names = [name for name in sys.modules if name.partition(".")[0] == "vllm" or "steno_worker.engines.vllm" in name]
    return {name: sys.modules.pop(name) for name in names}


@contextlib.contextmanager
def without_vllm(name: str) -> Iterator[Any]:
    """The module of this name, imported with nothing real beside it."""
    before, finder = _taken_out(), _AllBut(name)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        _taken_out()
        sys.modules.update(before)
