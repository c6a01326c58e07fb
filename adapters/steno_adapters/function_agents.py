"""Agents that are Python functions, in threads of this process: an `Executor` of `steno_rollouts`."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steno_rollouts.outcome import CommandOutcome
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.reward import read_answer


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
    """Calls one function per trial, in a thread of its own. What the function returns is the reward: a file in the trial's folder
    is none, since programs that the model runs can write there.

    A thread can't be ended: the trial of a cancelled one has, and the proxy refuses what its agent asks afterwards. Neither other
    trials nor the end of the process wait for it.
    """

    def __init__(self, function: AgentFunction) -> None:
        self._function = function
        self._rewards: dict[str, float | None] = {}  # of trials whose function has returned, until `verify` asks

    async def run(self, job: TrialJob) -> Exit:
        assert job.task is not None  # the runner gives it
        call = AgentCall(
            task=job.task.arguments(),
            trial_id=job.trial_id,
            openai_url=job.environment["OPENAI_BASE_URL"],
            anthropic_url=job.environment["ANTHROPIC_BASE_URL"],
            api_key=job.environment["OPENAI_API_KEY"],
            workdir=job.workdir,
            environment=job.environment,
        )
        played: Future[tuple[float | None, str]] = Future()
        played.set_running_or_notify_cancel()  # the thread can always say what came of it, whether or not anybody waits
        thread = threading.Thread(
            target=lambda: played.set_result(_played(self._function, call)), name=f"agent-{job.trial_id}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there are too many: of functions that hang, say
            return Exit(None, error=str(error))
        try:
            reward, problem = await asyncio.wait_for(asyncio.wrap_future(played), job.timeout_s)
        except TimeoutError:
            return Exit(None, timed_out=True)
        if problem:
            await asyncio.to_thread(job.stderr.write_text, problem, encoding="utf-8", errors="backslashreplace")
            return Exit(1)
        self._rewards[job.trial_id] = reward
        return Exit(0)

    async def verify(self, job: TrialJob, played: bool) -> CommandOutcome | None:
        if job.trial_id not in self._rewards:
            return None
        return read_answer(self._rewards.pop(job.trial_id), "the agent function")

    async def clear(self, folder: Path) -> None:
        """Threads of this process can't have been left by another one."""


def _played(function: AgentFunction, call: AgentCall) -> tuple[float | None, str]:
    """Returns: the reward; what went wrong, or "". Raises nothing: on the event loop, SystemExit would end all trials."""
    try:
        return _number(function(call)), ""
    except BaseException as error:
        return None, f"{''.join(traceback.format_exception(error))}\n{_named(error)}\n"


def _named(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of the agent's own class
        return type(error).__name__


def _number(reward: Any) -> float | None:
    """Raises: TypeError."""
    try:
        return None if reward is None else float(reward)
    except (TypeError, ValueError, OverflowError):
        said = repr(reward)[:200]
        raise TypeError(f"reward: the agent function returned {said}, must be a number or None") from None
