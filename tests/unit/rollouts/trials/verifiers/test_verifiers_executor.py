"""Where episodes of verifiers ask the model, without verifiers: its names are played."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import TrialJob
from steno_rollouts.trials.verifiers.executor import RUN_VARIABLE, VerifiersExecutor
from steno_rollouts.trials.verifiers.plan import VerifiersPlan


class Episodes:
    """As verifiers' `Env`, whose episodes come to nothing. asked: the address and the key that each was given."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: Any, context: Any, on_trace: Any) -> None:
        client = context.client
        self.asked.append((client.base_url, os.environ[client.api_key_var]))
        raise OSError("no agent")


async def test_an_episode_asks_its_trials_own_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollouts' own may be the control plane's port, where no model is asked."""
    monkeypatch.setenv(RUN_VARIABLE, "r")
    played = SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verifiers", cast(Any, SimpleNamespace(v1=played)))
    monkeypatch.setitem(sys.modules, "verifiers.v1", cast(Any, played))
    episodes = Episodes()
    plan = cast(VerifiersPlan, SimpleNamespace(given={"t": object()}, environment=lambda: episodes))
    executor = VerifiersExecutor(plan, RolloutSettings(verifiers="words", proxy="http://control:8081"), run_id="r")
    session = Session(trial_id="g.0", created_at=0.0, updated_at=0.0)
    url = "http://agents:8080/steno/g.0"
    trial = Trial(session=session, urls={"openai": f"{url}/v1", "anthropic": url, "gemini": url}, api_key="sk-trial")
    folder, task = tmp_path / "g.0", Task("t", {})
    work, variables = await executor.prepare(folder, trial, task, {})
    ended = await executor.run(TrialJob("g.0", [], variables, folder, work, None, task, url))
    assert (ended.code, ended.error) == (None, "OSError: no agent")
    assert episodes.asked == [(f"{url}/v1", "sk-trial")]
