"""`steno train` with an evaluation: before the first step and every N steps, on tasks that are never trained."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.integration.loop.product import RUN, SLOW_S, Product, rolling, thread
from tests.support.programs import forked
from tests.support.programs.processes import until

pytestmark = pytest.mark.loop

AGENT = """
import os, openai
openai.OpenAI().chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": os.environ["STENO_TASK_SAYS"]}], max_tokens=8)
"""
REWARD = """
def length(task, transcript):
    return {"reward": 1.0 if task["task_id"] == "kind" else 0.5, "chars": len(transcript.last_reply)}
"""


async def test_checkpoints_are_evaluated_beside_training_and_their_run_has_the_numbers(one: Product) -> None:
    """By a process of its own, which merges each adapter into the model; training asks nothing of it."""
    (one.folder / "agent.py").write_text(AGENT)
    (one.folder / "score.py").write_text(REWARD)
    (one.folder / "eval.jsonl").write_text(json.dumps({"id": "kind", "says": "Be kind."}) + "\n")
    command = [
        sys.executable, "-m", "steno", "evaluate", "--follow", str(one.folder / "train" / "checkpoints"), "--until-step", "2",
        "--proxy", one.url, "--engine", "transformers", "--tasks", str(one.folder / "eval.jsonl"), "--group-size", "2",
        "--reward", f"{one.folder / 'score.py'}:length", "--confine", "off", "--", sys.executable, str(one.folder / "agent.py"),
    ]  # fmt: skip
    log = one.folder / "follow.log"
    with log.open("wb") as out:
        beside = forked.start(command, os.environ | {"OMP_NUM_THREADS": "1"}, one.folder, out)
    try:
        await thread(until, lambda: "waiting for the next checkpoint in" in log.read_text(), "it looks for checkpoints")
        async with rolling(one, "task"):
            # The spy waits for its last numbers however long they take.
            trainer = one.train(spy=True, total_steps=2, checkpoint_every=2, lora_rank=4, lora_alpha=8)
            await thread(trainer.wait)
        assert await thread(beside.wait, SLOW_S) == 0, log.read_text()
    finally:
        if beside.poll() is None:
            beside.terminate()
            await thread(beside.wait, SLOW_S)
    assert "step 2" in log.read_text()
    with one.client() as client:
        steps = {step.step: step for step in client.step_page(RUN).items}
    lineage = trainer.saved()["path"][-1][0]
    assert steps[2].version == f"{lineage}/2" and steps[2].groups, "the trainer's own numbers of the step are kept"
    assert (steps[2].values["eval/reward"], steps[2].values["eval/trials"]) == (1.0, 2.0)
    assert "eval/reward" not in steps[1].values and steps[2].values["reward/mean"] is not None


async def test_the_first_policy_and_every_second_step_are_evaluated(one: Product) -> None:
    (one.folder / "agent.py").write_text(AGENT)
    (one.folder / "score.py").write_text(REWARD)
    asked = [{"id": name, "says": f"Be {name}."} for name in ("kind", "brief")]
    (one.folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    rollouts = {
        "tasks": str(one.folder / "eval.jsonl"), "command": [sys.executable, str(one.folder / "agent.py")],
        "reward": f"{one.folder / 'score.py'}:length", "group_size": 1, "work_dir": str(one.folder / "evaluated"),
    }  # fmt: skip
    (one.folder / "eval.yaml").write_text(json.dumps(rollouts))
    async with rolling(one, "task"):
        trainer = one.train(total_steps=4, eval_every=2, eval_config=str(one.folder / "eval.yaml"), report_by="says")
        await thread(trainer.wait)
    found = {line["step"]: line["values"] for line in trainer.metrics if "eval/reward" in line["values"]}
    assert {step: values["eval/reward"] for step, values in found.items()} == {0: 0.75, 2: 0.75, 4: 0.75}
    assert all(values["eval/trials"] == 2 and values["eval/unscored"] == 0 for values in found.values())
    assert all(values["eval/reward_by/Be kind."] == 1.0 for values in found.values())
    assert all(values["eval/reward_by/Be brief."] == 0.5 and "eval/trial/chars" in values for values in found.values())
    assert all(line["values"]["trial/rollout/wall_s"] > 0 for line in trainer.metrics if line["stepped"])
    assert not any(line["stepped"] for line in trainer.metrics if line["step"] == 0)
    view = await thread(one.balance, trainer)
    assert (view.eval_groups.running, view.eval_groups.ended) == (0, 6)
    lineage = trainer.saved()["path"][-1][0]
    evaluated = view.not_trained["evaluation"]
    assert evaluated.keys() == {f"{lineage}/{step}" for step in (0, 2, 4)}, "each by the weights of its step"
