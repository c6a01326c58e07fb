"""vLLM's engine process, which must not outlive its worker.

vLLM ends it when the worker ends in order; of one that is killed it learns nothing, and would keep its GPU until somebody looks.
So the kernel is asked to kill it with its parent. The processes of its tensor-parallel ranks end by themselves when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

_PR_SET_PDEATHSIG = 1
_run = EngineCoreProc.run_engine_core


@contextlib.contextmanager
def dying_with_this() -> Iterator[None]:
    """Engines that are started meanwhile end with the thread that starts them, however it ends; as a rule, with the process."""
    EngineCoreProc.run_engine_core = staticmethod(run)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run)


def run(*args: Any, **kwargs: Any) -> None:
    """`EngineCoreProc.run_engine_core`, in the engine's process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it died before the kernel was asked
            sys.exit(1)
    _run(*args, **kwargs)
