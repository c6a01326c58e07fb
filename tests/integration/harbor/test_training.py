"""Harbor's trials feed a trainer: `steno rollout --harbor` beside `steno train`, with the model that ships with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.containers.test_containers import AGENT
from tests.integration.harbor.conftest import PROXY, SHELL, WORKER_KEY, Harbor
from tests.integration.loop.product import RUN, WORKER, product
from tests.integration.rollouts.conftest import ADMIN, until_served

pytestmark = pytest.mark.harbor

TASKS = ("first", "second")
"""One for each step: a step takes one group here."""
DO = (
    'python3 /opt/task/agent.py\ncase "$OPENAI_BASE_URL" in *.0/v1) echo hello ;; *) echo no ;; esac >/app/answer.txt\n'
)
"""One turn, and an answer by which one trial of two is right."""
CHECK = """#!/bin/bash
if grep -q hello /app/answer.txt; then r=1; else r=0; fi
printf '{"reward": %s}' $r >/logs/verifier/reward.json
"""


def test_two_steps_are_trained_on_harbor_s_trials_and_the_books_balance(rollout: Harbor, tmp_path: Path) -> None:
    agent = {"environment/agent.py": AGENT.replace('"model": "m"', '"model": "m", "max_tokens": 16')}
    for name in TASKS:
        tasks = rollout.task(name, "", {"instruction.md": DO, "tests/test.sh": CHECK, **agent})
    with product(tmp_path / "product", worker=None, proxy=PROXY, key=ADMIN) as one:
        one.stack.start_worker(*WORKER, *WORKER_KEY, "--staging-dir", str(tmp_path / "staged"))
        until_served(one.stack)
        rollout.stack = one.stack
        law = ("--sampling", '{"temperature": 1.0, "top_p": 1.0}')
        trainer = one.train(total_steps=len(TASKS), groups_per_step=1, ranks=1)
        options = ("--run", RUN, "--agent", SHELL, "--group-size", "2", "--in-flight", "2", *law)
        said = rollout(tasks, *options, command=[])
        trainer.wait()
        rewards = {row["trial_id"][-2:] + row["task_id"]: row["reward"] for row in rollout.rows()}
        assert rewards == {f".{at}{name}": 1.0 - at for at in (0, 1) for name in TASKS}, said
        assert [line["step"] for line in trainer.steps] == [1, 2]
        assert all(line["values"]["reward/mean"] == 0.5 for line in trainer.steps)
        view = one.balance(trainer)
        ledger = trainer.saved()["ledger"].accounts()
    assert sum(view.sampled.values()) == sum(account.trained for account in ledger.values()) > 0, "nothing was left out"
    assert rollout.left() == []
