"""`steno train` with an evaluation: before the first step and every N steps, on tasks that are never trained."""

from __future__ import annotations

import json
import sys

import pytest

from tests.integration.loop.product import Product, rolling, thread

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
