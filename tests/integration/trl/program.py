"""A training run with TRL, as its users write one: `python -m tests.integration.trl.program SETTINGS`, a JSON object.

It prints a line of JSON for each push and each step, and one at the end. `end` has it end itself at the end of a step, by a
signal, before anything of that step is saved: SIGKILL, or SIGINT as Ctrl-C sends it. `mini` is the socket of a server of
mini-swe-agent; without it the agent is the demo's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from steno.models import TINY
from steno_adapters import AgentCall, Collector, probe_of
from steno_adapters.trl import AsyncRollouts
from steno_cli.demo.task import NotesWorld, make_misleading_world
from steno_cli.demo.toy_agent import solve
from tests.integration.trl import cpu_attention
from tests.integration.trl.shell_model import CONFIG, notes_read, write_notes
from tests.support.programs.mini_agent import end_runs, run_mini


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Player:
    """The agent: the demo's task. The first trial of a group has a conversation beside it (a fork), the second one fails, the
    third hangs up in the middle of an answer (a partial turn)."""

    def __init__(self, mini: Path | None) -> None:
        self._mini = mini

    def __call__(self, call: AgentCall) -> float:
        number = int(call.trial_id.rsplit(".", 1)[1])
        world = make_misleading_world(call.task["world"])
        with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=8) as client:
            if number == 0:
                asked: list[Any] = [{"role": "user", "content": f"Name this: {world.question()}"}]
                client.chat.completions.create(model="tiny", messages=asked, max_tokens=8)
            if number == 2:
                asked = [{"role": "user", "content": f"Tell me everything about {world.question()}"}]
                with client.chat.completions.create(
                    model="tiny", messages=asked, max_tokens=200, stream=True
                ) as chunks:
                    next(chunks)
            if self._mini:
                reward = _by_shell(self._mini, call, world)
            else:
                reward = float(world.solved_by(solve(client, "tiny", world, stream=True, say=lambda line: None)))
        if number == 1:
            raise RuntimeError("this agent always breaks")
        return reward


def _by_shell(mini: Path, call: AgentCall, world: NotesWorld) -> float:
    """By mini-swe-agent. Whatever it does wrong is the model's fault, and no failure."""
    write_notes(world, call.workdir)
    trajectory = call.workdir / "trajectory.json"
    arguments = [
        "-y", "--exit-immediately", "-l", "0", "-m", "openai/tiny", "--model-class", "litellm", "-c", str(CONFIG),
        "-c", f"model.model_kwargs.api_base={call.openai_url}", "-t", world.question(), "-o", str(trajectory),
    ]  # fmt: skip
    environment = {"PATH": os.environ["PATH"], "HOME": str(call.workdir), **call.environment}
    run_mini(mini, arguments, call.workdir, environment, call.workdir / "mini.log")
    return notes_read(world, trajectory)


class ProbedRollouts(AsyncRollouts):
    """Asks the worker something after each push, and says how far its log-probabilities are from the model's, in nats."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        super().send_weights(iterator)
        version = f"{self.versions.lineage}/{self._step}"
        say(pushed=version, worst=model_says(self._trainer.model, self._collector, version))


def model_says(model: Any, collector: Collector, version: str) -> float:
    """Returns: the largest difference between the log-probabilities on record, under these weights, and the model's own."""
    name = f"{collector.run}-after-{version.replace('/', '-')}"
    trial = collector.client.register(name)
    with openai.OpenAI(base_url=trial.urls["openai"], api_key=trial.api_key or "none", max_retries=8) as client:
        asked: list[Any] = [{"role": "user", "content": "Find the code word. Start with notes/apple.txt."}]
        client.chat.completions.create(model="tiny", messages=asked, max_tokens=48, temperature=1.0, top_p=1.0)
    [sample] = collector.client.samples(name)
    assert [span.version for span in sample.spans] == [version], sample.spans
    ids, mask, recorded = sample.to_numpy()
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    own = probe_of(plain, ids.tolist()).logprobs
    return float(abs(torch.tensor(own)[mask[1:]] - torch.tensor(recorded[mask])).max())


class Watch(TrainerCallback):  # type: ignore[misc]
    """end: (step, signal). rise: training stops once the mean reward of two steps is so much above that of the first two."""

    def __init__(self, rollouts: AsyncRollouts, end: tuple[int, str] | None, rise: float | None) -> None:
        self._rollouts, self._end, self._rise = rollouts, end, rise
        self.rewards: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])
        risen = sum(self.rewards[-2:]) / 2 - sum(self.rewards[:2]) / 2
        if self._rise is not None and risen > self._rise:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(step=state.global_step, finished=self._rollouts.progress.finished, passed=self._rollouts.progress.passed)
        if self._end and state.global_step == self._end[0]:
            os.kill(os.getpid(), signal.Signals[self._end[1]])


def main() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    cpu_attention.prepare()
    out = Path(given["out"])
    tasks = [{"task_id": f"world-{number}", "world": f"{given['run']}-{number}"} for number in range(64)]
    mini = given.get("mini")
    with Collector(
        given["proxy"],
        given["run"],
        agent=Player(Path(mini) if mini else None),
        in_flight=32,
        temperature=given.get("temperature", 1.0),
        lease_ttl_s=10.0,
    ) as collector:
        rollouts = ProbedRollouts(collector, tasks, n=given.get("size", 8))
        args = AsyncGRPOConfig(
            str(out), max_steps=given["steps"], per_device_train_batch_size=given.get("rows", 32), learning_rate=1e-4,
            max_staleness=given.get("max_staleness", 2), save_steps=given.get("save_steps", 2), report_to="none", use_cpu=True,
            bf16=False, temperature=given.get("temperature", 1.0), gradient_checkpointing=False, logging_steps=1,
            disable_tqdm=True,
        )  # fmt: skip
        watch = Watch(rollouts, given.get("end"), given.get("rise"))
        trainer = rollouts.trainer(given.get("model", str(TINY)), args, callbacks=[watch])
        cpu_attention.register()
        trainer.train(resume_from_checkpoint=True if list(out.glob("checkpoint-*")) else None)
        say(rewards=watch.rewards, counts=rollouts.counts)


if __name__ == "__main__":
    try:
        main()
    finally:
        end_runs()
