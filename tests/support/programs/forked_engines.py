"""vLLM whose processes are forks of the one that starts the engine: `tests.support.programs.forked` has vLLM workers import this.

On a CPU vLLM spawns them, and each imports vLLM again: six seconds of processor time, for each of the two processes of an engine.
Forks are what it starts by default elsewhere.
"""

from __future__ import annotations

import os
import signal

import vllm.v1.engine.async_llm
import vllm.v1.executor.multiproc_executor
from vllm import envs
from vllm.utils import system_utils

IMPORTED = (vllm.v1.engine.async_llm, vllm.v1.executor.multiproc_executor, envs)


def _fork() -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


# Private, so that an upgrade that has it no more is noticed here.
assert callable(system_utils._maybe_force_spawn), "where vLLM decides how its processes start"
system_utils._maybe_force_spawn = _fork
# A signal to the fork is none to the event loop that it was forked from.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
