"""Rollouts of the model that ships with the project: what they leave is a trainer's."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from steno.client.client import AsyncClient
from steno.contracts.runs.leases import LeaseRequest
from steno_cli.demo.task import make_world
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.plan import epochs
from tests.integration.rollouts.conftest import TOY
from tests.support.programs.processes import SLOW_S, process, until
from tests.support.programs.stack import running

REWARD = """
async def solved(task, transcript):
    return task["_answer"] in transcript.last_reply.lower()

def ranked(trials):
    return [{"reward": place + one.reward / 10, "solved": one.reward} for place, one in enumerate(trials)]
"""


@pytest.mark.usefixtures("clean_environment")
async def test_groups_go_to_the_trainer_and_their_places_to_the_next(tmp_path: Path) -> None:
    """A bound of one group: the second is started when the trainer has acknowledged the first, and not before. None is leased
    before its trials were scored together."""
    (tmp_path / "score.py").write_text(REWARD)
    lines = [{"id": f"w{n}", "seed": n, "_answer": make_world(n).code_word} for n in (1, 2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running(tmp_path / "stack", []) as stack:
        settings = RolloutSettings(
            tasks=tmp_path / "tasks.jsonl", command=TOY, reward=f"{tmp_path / 'score.py'}:solved", proxy=stack.url,
            group_size=2, in_flight=8, groups_per_step=1, max_staleness_steps=0, work_dir=tmp_path / "work", run="r",
            group_reward=f"{tmp_path / 'score.py'}:ranked",
            sampling={"temperature": 0.3},  # at 1.0, one first answer in a thousand calls no tool
        )  # fmt: skip
        prepared = Prepared.of(settings, "r")
        async with prepared.client() as client, asyncio.timeout(300):
            rolling = asyncio.create_task(prepared.rollouts(client).run(epochs(prepared.tasks, 1)))
            for number in range(2):
                (lease,) = await leased(client)
                assert [trial.status for trial in lease.trials] == ["completed"] * 2 and not lease.left_out
                assert [trial.reward for trial in lease.trials] == [
                    place + trial.metrics["own_reward"] / 10 for place, trial in enumerate(lease.trials)
                ]
                groups = (await client.run("r")).groups
                assert (groups.acknowledged, groups.in_hand) == (number, 1)
                assert not rolling.done() or number == 1
                await client.acknowledge(lease.lease_id)
            results = await rolling
        assert len(results) == 4 and all(result.reward is not None for result in results)
        assert all(result.turns >= 2 and result.completion_tokens > 20 for result in results)


async def leased(client: AsyncClient) -> list:  # type: ignore[type-arg]
    while not (found := await client.lease(LeaseRequest(run_id="r", consumer="t", max_groups=5, wait_s=5))):
        pass
    return found


def test_the_command_says_how_it_went_on_a_terminal(tmp_path: Path) -> None:
    """Under a pseudo-terminal: a live line, and a last one that stays. The agents end when the line has shown them."""
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    go, shown = tmp_path / "go", tmp_path / "shown.log"
    agent = f"while [ ! -e {shlex.quote(str(go))} ]; do sleep 0.1; done; echo 1 > reward.txt"
    with running(tmp_path / "stack", None) as stack:
        words = [
            sys.executable, "-m", "steno", "rollout", "--tasks", str(tmp_path / "tasks.jsonl"), "--proxy", stack.url,
            "--group-size", "2", "--stop-after-failures", "0", "--work-dir", str(tmp_path / "work"), "--confine", "off",
            "--", "sh", "-c", agent,
        ]  # fmt: skip
        code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
        with process([sys.executable, "-c", code, *words], shown) as child:
            until(lambda: "0/2 trials, 2 running" in shown.read_text(errors="replace"), shown.read_text)
            go.touch()
            ended = child.wait(SLOW_S)
    said = shown.read_text()
    assert ended == 0, said
    assert "2/2 trials, 0 running, 1/1 groups, mean reward 1.000" in said
