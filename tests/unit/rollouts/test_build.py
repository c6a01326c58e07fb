"""What is checked before anything runs, and how many groups the staleness bound admits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno.contracts.runs.leases import RunGroups, RunTrainer, RunView
from steno_rollouts.build import Prepared, located
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.admission import Admission
from steno_rollouts.groups.plan import epochs
from steno_rollouts.tasks.task import Task


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 100))
async def test_a_group_is_admitted_while_the_trainer_can_use_it_in_time(step: int, bound: int, held: int) -> None:
    async def in_hand() -> int:
        return held

    assert await Admission(step, bound).admits(in_hand) == (held < step * (bound + 1))


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"groups": RunGroups(running=2, ready=6)}, "no trainer of run r has been seen: start it: steno train --run r"),
        ({"groups": RunGroups(ready=2, used=6)}, "a trainer that does not register has taken 6 groups of run r"),
        ({"trainer": RunTrainer(name="n", epoch=1)}, "the trainer n has ended: start it: steno train --run r"),
        (
            {"trainer": RunTrainer(name="n", epoch=1, heard_s=90.0)},
            "the trainer n sent its last heartbeat 90 s ago: look at",
        ),
        ({"trainer": RunTrainer(name="n", epoch=1, heard_s=2.0)}, "the trainer n is running (last heartbeat 2 s ago)"),
        ({"groups": RunGroups(running=8)}, "(8 running, 0 ready, 0 leased)"),
    ],
)
def test_who_is_held_back_is_told_by_whom(view: dict[str, Any], said: str) -> None:
    why = Admission(4, 1).waits_for(RunView(run_id="r", **({"groups": RunGroups(ready=8)} | view)))
    assert said in why and "--groups-per-step 4 --max-staleness-steps 1 admit no more" in why
    assert ("running trials must end first" in why) == ("(8 running" in said)


async def test_without_a_bound_nobody_is_asked() -> None:
    async def in_hand() -> int:
        raise AssertionError("asked")

    assert await Admission().admits(in_hand)


@pytest.mark.parametrize("bad", [{"groups_per_step": 0}, {"max_staleness_steps": -1}])
def test_a_bound_that_is_none_is_named(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Admission(**bad)


def test_a_program_by_a_relative_path_is_the_one_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.sh").touch()
    assert located(["./agent.sh", "./x"]) == (str(tmp_path / "agent.sh"), "./x")
    assert located(["./of-the-task.sh"]) == ("./of-the-task.sh",)
    assert located(["agent.sh"]) == ("agent.sh",) and located([]) == ()


def test_epochs_come_in_the_same_order_again() -> None:
    tasks = [Task(str(n), {}) for n in range(20)]
    first = list(epochs(tasks, 2, shuffle_seed=7))
    assert first == list(epochs(tasks, 2, shuffle_seed=7))
    orders = [[plan.task.task_id for plan in first if plan.round == f"epoch-{n}"] for n in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert [plan.task for plan in epochs(tasks, 1)] == tasks


def test_settings_that_can_not_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--proxy: got 'x', must be http"):
        RolloutSettings.load({"tasks": str(tmp_path), "proxy": "x"}, None)
    with pytest.raises(ConfigError, match="groups for evaluation are never trained"):
        RolloutSettings.load({"tasks": str(tmp_path), "purpose": "eval", "groups_per_step": "2"}, None)
    with pytest.raises(ConfigError, match="tasks: missing: give a folder or a file"):
        RolloutSettings.load({}, None)
    with pytest.raises(ConfigError, match="name that run"):
        RolloutSettings.load({"tasks": str(tmp_path), "key": "rk-steno-x"}, None)
    (tmp_path / "t.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="give the command of a trial"):
        Prepared.of(RolloutSettings(tasks=tmp_path / "t.jsonl"), "run")
