"""The launcher's side of the process that keeps pods."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from pathlib import Path

import pytest

from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import CannotStart
from steno_rollouts.trials.harbor.executor import HarborExecutor
from steno_rollouts.trials.harbor.interpreter import HarborPython
from steno_rollouts.trials.harbor.kubernetes.fleet import Fleet, PodsError
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.plan import HarborPlan
from steno_rollouts.trials.harbor.pointing import POINTINGS
from tests.support.waiting import until

KEEPER = """#!{python}
import json, sys

from pathlib import Path

with Path({started!r}).open("a") as file:
    file.write("started ")
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    found = [] if asked["do"] == "left" else {{"ended": 1, "left": ["pod-1"]}}
    answer = {{"error": "the API server refused"}} if number == 0 else {{"found": found}}
    print(json.dumps({{"id": asked["id"], **answer}}), flush=True)
"""


def keeper(tmp_path: Path) -> Path:
    found = tmp_path / "python"
    found.write_text(KEEPER.format(python=sys.executable, started=str(tmp_path / "started")))
    found.chmod(0o755)
    return found


async def test_a_cluster_that_refused_once_is_asked_again_for_the_next_trial(tmp_path: Path) -> None:
    started = tmp_path / "started"
    fleet = Fleet(keeper(tmp_path), KubernetesOptions(), "run")
    try:
        with pytest.raises(PodsError, match="the API server refused"):
            await fleet.begun()
        await fleet.begun()
        await fleet.begun()
        assert started.read_text() == "started ", "one process for all"
    finally:
        fleet.close()


async def test_a_fleet_that_nobody_has_any_more_ends_its_process_and_removes_its_folder(tmp_path: Path) -> None:
    """As that of rollouts that have ended, in a process that goes on."""
    fleet = Fleet(keeper(tmp_path), KubernetesOptions(), "run")
    with contextlib.suppress(PodsError):
        await fleet.begun()
    process, folder = fleet._process, Path(fleet._folder.name)
    assert process is not None and process.poll() is None and folder.is_dir()
    del fleet
    await asyncio.sleep(0)  # this step of the task still has the error, whose traceback has the fleet
    gc.collect()
    assert process.wait(60) == -signal.SIGTERM and not folder.exists()


async def test_a_process_that_can_not_be_started_is_tried_again_for_the_next_trial(tmp_path: Path) -> None:
    """A disk that is full for a moment, or too many open files."""
    fleet = Fleet(tmp_path / "python", KubernetesOptions(), "run")
    try:
        with pytest.raises(PodsError, match=r"the process that keeps the pods can't be started: .*No such file"):
            await fleet.begun()
        keeper(tmp_path)
        with pytest.raises(PodsError, match="the API server refused"):
            await fleet.begun()
        await fleet.begun()
    finally:
        fleet.close()


async def test_a_process_that_could_not_be_started_again_is_tried_until_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python, started = keeper(tmp_path), tmp_path / "started"
    fleet = Fleet(python, KubernetesOptions(), "run")
    try:
        with pytest.raises(PodsError, match="the API server refused"):
            await fleet.begun()
        await fleet.begun()
        away = python.rename(tmp_path / "away")
        (Path(fleet._folder.name) / "keeper.log").unlink()  # as where no file can be opened
        fleet._pause = 0.01
        assert fleet._process is not None
        fleet._process.kill()
        await until(lambda: caplog.text.count("the process that keeps the pods can't be started: ") > 1)
        away.rename(python)
        await until(lambda: started.read_text() == "started started ")
        with pytest.raises(PodsError, match="the API server refused"):
            await fleet.clear("g.0", wait=True)
        assert await fleet.clear("g.0", wait=True) == ["pod-1"]
    finally:
        fleet.close()


@pytest.mark.parametrize("key", ["sk-next", None])
async def test_a_pod_that_can_not_be_ended_holds_up_no_attempt_with_a_key_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    """Its node is lost: without keys, whoever is in it could go on with the trial, and one recording would hold two attempts."""
    pointing = POINTINGS["codex"]
    python = HarborPython(keeper(tmp_path), "", frozenset(), frozenset())
    plan = HarborPlan(python, "codex", None, pointing, kubernetes=KubernetesOptions())
    settings = RolloutSettings(harbor="x", agent="codex", environment="kubernetes", work_dir=tmp_path / "trials")
    executor = HarborExecutor(plan, settings)
    folder, session = tmp_path / "trials" / "g.0", Session(trial_id="g.0", created_at=0.0, updated_at=0.0)
    trial = Trial(
        session=session, urls=dict.fromkeys(("openai", "anthropic", "gemini"), "http://proxy/g.0"), api_key=key
    )
    assert executor._fleet is not None
    try:
        with pytest.raises(CannotStart, match="the API server refused"):
            await executor.clear(folder)
        await executor.clear(folder)
        assert "g.0: pod pod-1 was deleted and is not gone after 120 s" in caplog.text
        if key is None:
            with pytest.raises(CannotStart, match="pod pod-1 can't be ended, and on a proxy without keys"):
                await executor.prepare(folder, trial, Task("t", {}), {})
        work, _variables = await executor.prepare(folder, trial, Task("t", {}), {})
        assert work.is_dir()
    finally:
        executor._fleet.close()
