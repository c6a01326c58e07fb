"""Agents that are Python functions, in threads of this process: an `Executor` of `steno_rollouts`."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steno_rollouts.trials.executor import Executor, Exit, TrialJob


@dataclass(frozen=True)
class AgentCall:
    """What an agent function gets: its task's fields (its own copy), and where its model is.

    openai_url: ends in /v1. anthropic_url: without a version. api_key: any text where the proxy asks for no key. workdir: an
    empty folder of its own. environment: what a command in its place would get (`OPENAI_BASE_URL`, `STENO_TASK_…`).
    """

    task: dict[str, Any]
    trial_id: str
    openai_url: str
    anthropic_url: str
    api_key: str
    workdir: Path
    environment: Mapping[str, str]


AgentFunction = Callable[[AgentCall], float | None]
"""Plays one trial. Returns its reward; None: not scored. An exception, `sys.exit()` too: the trial failed, and is not trained."""


class FunctionAgents(Executor):
    """Calls one function per trial, `threads` at a time. A thread can't be ended: the trial of a cancelled one has, and the proxy
    refuses what its agent asks afterwards."""

    def __init__(self, function: AgentFunction, threads: int) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="agent")

    async def run(self, job: TrialJob) -> Exit:
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._call, job)
        try:
            return await asyncio.wait_for(running, job.timeout_s)
        except TimeoutError:
            return Exit(None, timed_out=True)

    async def clear(self, folder: Path) -> None:
        """Threads of this process can't have been left by another one."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, job: TrialJob) -> Exit:
        assert job.task is not None  # the runner gives it
        given = AgentCall(
            task=job.task.arguments(),
            trial_id=job.trial_id,
            openai_url=job.environment["OPENAI_BASE_URL"],
            anthropic_url=job.environment["ANTHROPIC_BASE_URL"],
            api_key=job.environment["OPENAI_API_KEY"],
            workdir=job.workdir,
            environment=job.environment,
        )
        try:
            reward = _number(self._function(given))
        except BaseException as error:  # of its thread: on the event loop, SystemExit would end all trials
            job.stderr.write_text(f"{traceback.format_exc()}\n{type(error).__name__}: {error}\n")
            return Exit(1, error=str(error))
        if reward is not None:
            (job.workdir / "reward.txt").write_text(repr(reward))
        return Exit(0)


def _number(reward: Any) -> float | None:
    """Raises: TypeError."""
    try:
        return None if reward is None else float(reward)
    except (TypeError, ValueError, OverflowError):
        said = repr(reward)[:200]
        raise TypeError(f"reward: the agent function returned {said}, must be a number or None") from None
