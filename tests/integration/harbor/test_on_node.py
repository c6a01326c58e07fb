"""What the process of an attempt on a node of Ray's does in Harbor's sandboxes, started as by Ray's worker: without Ray."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.rest import GroupSpec
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import EndReason
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.trials.harbor.plan import harbor_plan
from steno_rollouts.trials.ray import worker
from steno_rollouts.trials.ray.parcels import Answer, Keys, NodeRequest, SentFile, packed
from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import PYTHON, SHELL, Harbor, own_address
from tests.integration.harbor.test_harbor import APART, CHECK, TURN
from tests.integration.rollouts.conftest import ADMIN

pytestmark = pytest.mark.harbor


def test_an_attempt_runs_in_a_sandbox_from_its_parcel(rollout: Harbor) -> None:
    """Its task and its agent are nowhere but in the parcel; the group's key tells the proxy of the task's step."""
    files = {"steps/only/instruction.md": TURN, "steps/only/tests/test.sh": CHECK, "environment/agent.py": AGENT}
    tasks = rollout.task("apart", f'{APART}[[steps]]\nname = "only"\n', files)
    settings = RolloutSettings(
        harbor=str(tasks), agent=SHELL, environment="podman", harbor_python=Path(PYTHON), executor="ray", keep="none",
        proxy=f"http://{own_address()}:{rollout.stack.port}", work_dir=rollout.folder / "there",
    )  # fmt: skip
    plan, (task,), _ = harbor_plan(settings, str(tasks), TaskSelection())
    assert task.folder is not None and plan.agent_file is not None
    with Client(settings.proxy, ADMIN) as steno:
        group = steno.create_group(GroupSpec(group_id="on-node", run_id="node", task={"a": 1}, size=1))
        trial = group.trials[0]
        agent = replace(SentFile.of(plan.agent_file), path=Path("elsewhere/shell.py"))
        request = NodeRequest(
            "play", settings, "node", replace(task, folder=Path("elsewhere/apart")),
            trial.model_copy(update={"api_key": None}), harbor=plan, agent=agent,
        )  # fmt: skip
        parcel = (pickle.dumps(Keys(trial.api_key, group.harness_key)), pickle.dumps(request), packed(task.folder))
        answer = pickle.loads(worker._attended(pickle.dumps((*parcel, ("0123456789abcdef", "10.0.0.1")))))
        assert isinstance(answer, Answer) and answer.problem is None and answer.outcome is not None
        assert (answer.outcome.reason, answer.outcome.reward) == (EndReason.COMPLETED, 1.0), answer
        assert answer.outcome.metrics["tests"] == 3.0
        assert [turn.task_step for turn in steno.turns(trial.session.trial_id)] == ["only"]
    assert rollout.left() == []
