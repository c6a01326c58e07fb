"""A trainer of one's own in plain PyTorch: agents play, their tokens are trained with GRPO, new weights go back to the workers.

    steno proxy &
    steno worker --engine transformers --model MODEL &
    python adapters/examples/plain_loop.py --proxy http://127.0.0.1:8000 --model MODEL

The task and the agent are the demo's: the model follows notes to a code word, through the official OpenAI SDK and one tool.
"""

import argparse
import itertools
from statistics import fmean, pstdev

import openai
import torch
from transformers import AutoModelForCausalLM

from steno_adapters import AgentCall, CollectedGroup, Collector, as_in_checkpoint, packed, probe_of
from steno_cli.demo.task import make_misleading_world
from steno_cli.demo.toy_agent import solve

ROWS_AT_ONCE = 16
CLIP = 0.2


def play(call: AgentCall) -> float:
    """One trial. What it returns is its reward."""
    world = make_misleading_world(call.task["world"])
    with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=5) as client:
        return float(world.solved_by(solve(client, "tiny", world, stream=True, say=lambda line: None)))


def advantages(groups: list[CollectedGroup]) -> dict[str, float]:
    """By trial: its reward, centred and scaled within its group. A group whose rewards are equal says nothing."""
    found = {}
    for group in groups:
        mean, spread = fmean(group.rewards.values()), pstdev(group.rewards.values())
        if spread:
            found.update({trial: (reward - mean) / spread for trial, reward in group.rewards.items()})
    return found


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[CollectedGroup]) -> None:
    by_trial = advantages(groups)
    rows = [row for group in groups for row in group.rows if row.trial_id in by_trial]
    total = sum(row.trained_tokens for row in rows)
    optimizer.zero_grad()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        batch = packed(some, [by_trial[row.trial_id] for row in some])
        logits = model(input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False).logits[:, :-1]
        now = torch.log_softmax(logits / batch.temperatures[:, 1:, None], -1)
        logprobs = now.gather(-1, batch.token_ids[:, 1:, None])[..., 0]
        trained, gain = batch.loss_mask[:, 1:], batch.advantages[:, 1:]
        ratios = (logprobs - batch.logprobs[:, 1:])[trained].exp()  # to what each token was sampled at
        clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratios * gain[trained], clipped * gain[trained]).sum() / total
        torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def push(collector: Collector, policy: torch.nn.Module, version: str) -> None:
    collector.push(as_in_checkpoint(policy, policy.state_dict()), version, probe=probe_of(policy, range(24)))


def train(proxy: str, model: str, *, run: str, steps: int, groups: int = 6, size: int = 8) -> list[float]:
    """Returns: the mean reward of each step's trials."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    tasks = ({"task_id": f"{run}-{number}", "world": f"{run}-{number}"} for number in itertools.count())
    rewards: list[float] = []
    with Collector(proxy, run, agent=play, in_flight=48) as collector:
        push(collector, policy, f"{run}/0")
        for number in range(1, steps + 1):
            found = collector.collect(itertools.islice(tasks, groups), size)
            step(policy, optimizer, found)
            push(collector, policy, f"{run}/{number}")
            collector.acknowledge(found)  # save a checkpoint before, and a group is neither lost nor trained twice
            rewards.append(fmean(reward for group in found for reward in group.rewards.values()))
            print(f"step {number}: mean reward {rewards[-1]:.2f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="folder or name of the model that the workers serve")
    parser.add_argument("--run", default="plain")
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    train(given.proxy, given.model, run=given.run, steps=given.steps)
