"""A training run with TRL, as its users write one: `python -m tests.integration.trl.program SETTINGS`, a JSON object.

It prints a line of JSON for each step, and one at the end. `die_at_step` kills it (SIGKILL) at the end of that step, before
anything of it is saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from steno.models import TINY
from steno_adapters import AgentCall, Collector, probe_of
from steno_adapters.trl import AsyncRollouts
from steno_cli.demo.task import make_misleading_world
from steno_cli.demo.toy_agent import solve
from tests.integration.trl import cpu_attention


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def play(call: AgentCall) -> float:
    """The demo's task. The first trial of a group has a conversation beside it (a fork), the second one fails, the third hangs up
    in the middle of an answer (a partial turn)."""
    number = int(call.trial_id.rsplit(".", 1)[1])
    world = make_misleading_world(call.task["world"])
    with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=8) as client:
        if number == 0:
            asked: list[Any] = [{"role": "user", "content": f"Name this: {world.question()}"}]
            client.chat.completions.create(model="tiny", messages=asked, max_tokens=8)
        if number == 2:
            asked = [{"role": "user", "content": f"Tell me everything about {world.question()}"}]
            with client.chat.completions.create(model="tiny", messages=asked, max_tokens=200, stream=True) as chunks:
                next(chunks)
        reward = float(world.solved_by(solve(client, "tiny", world, stream=True, say=lambda line: None)))
    if number == 1:
        raise RuntimeError("this agent always breaks")
    return reward


def model_says(model: Any, collector: Collector, version: str) -> float:
    """The worker is asked once more, under the last weights. Returns: the largest difference between the log-probabilities on
    record and the model's own, in nats."""
    trial = collector.client.register(f"{collector.run}-after")
    with openai.OpenAI(base_url=trial.urls["openai"], api_key=trial.api_key or "none", max_retries=8) as client:
        asked: list[Any] = [{"role": "user", "content": "Find the code word. Start with notes/apple.txt."}]
        client.chat.completions.create(model="tiny", messages=asked, max_tokens=48, temperature=1.0, top_p=1.0)
    [sample] = collector.client.samples(f"{collector.run}-after")
    assert [span.version for span in sample.spans] == [version], sample.spans
    ids, mask, recorded = sample.to_numpy()
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    own = probe_of(plain, ids.tolist()).logprobs
    return float(abs(torch.tensor(own)[mask[1:]] - torch.tensor(recorded[mask])).max())


class Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, rollouts: AsyncRollouts, die_at_step: int | None) -> None:
        self._rollouts, self._die_at_step = rollouts, die_at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(step=state.global_step, finished=self._rollouts.progress.finished, passed=self._rollouts.progress.passed)
        if state.global_step == self._die_at_step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    cpu_attention.prepare()
    out = Path(given["out"])
    tasks = [{"task_id": f"world-{number}", "world": f"{given['run']}-{number}"} for number in range(64)]
    with Collector(
        given["proxy"],
        given["run"],
        agent=play,
        in_flight=32,
        temperature=given.get("temperature", 1.0),
        lease_ttl_s=10.0,
    ) as collector:
        rollouts = AsyncRollouts(collector, tasks, n=given.get("size", 8))
        args = AsyncGRPOConfig(
            str(out), max_steps=given["steps"], per_device_train_batch_size=given.get("rows", 32), learning_rate=3e-4,
            max_staleness=given.get("max_staleness", 2), save_steps=given.get("save_steps", 2), report_to="none", use_cpu=True,
            bf16=False, temperature=given.get("temperature", 1.0), gradient_checkpointing=False, logging_steps=1,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = rollouts.trainer(str(TINY), args, callbacks=[Watch(rollouts, given.get("die_at_step"))])
        cpu_attention.register()
        trainer.train(resume_from_checkpoint=True if list(out.glob("checkpoint-*")) else None)
        said = model_says(trainer.model, collector, f"{rollouts.versions.lineage}/{given['steps']}")
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
        say(rewards=rewards, counts=rollouts.counts, worst=said)


if __name__ == "__main__":
    main()
