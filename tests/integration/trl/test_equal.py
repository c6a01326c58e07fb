"""Of the same leases, TRL's loss and gradient through `AsyncRollouts` are those of `steno train`.

| what | TRL 1.16 | steno train |
|---|---|---|
| loss | clipped ratio to the recorded log-probabilities, epsilon 0.2 | `around_sampler`, clip_low 0.2, clip_high 0.2 |
| weights | sum over tokens / tokens of the batch | aggregation `token_mean` |
| advantages | (r - mean) / (std + 1e-6) of a group, std with n - 1 | `grpo` |
| correction, reference, entropy | none | mismatch off, none, 0 |
| logits | divided by `temperature` 0.7 | by the recorded temperature, 0.7 |
| precision | float32 | float32 |
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno.models import TINY
from steno_adapters import AgentCall, CollectedGroup, Collector
from steno_trainer.data.advantages import Estimator, ScoredTrial, group_advantages
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.rows import TrainingTerms, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.objective.aggregation import Aggregation, SampleShare, token_weights
from steno_trainer.objective.loss import Objective, Tokens, policy_loss
from steno_trainer.objective.mismatch import Correction, Mismatch
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

pytestmark = pytest.mark.trl

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with (
        without_settings(),
        running(tmp_path_factory.mktemp("stack"), ["--engine", "transformers", "--model", str(TINY)]) as found,
    ):
        yield found


def talk(call: AgentCall) -> float:
    """Two turns of one conversation and one of another; one in four hangs up in the middle of an answer. With seeds: of other
    draws some have a ratio at the clip's bound."""
    number = int(call.trial_id.rsplit(".", 1)[1])
    asked: dict[str, Any] = {"model": "tiny", "seed": number}
    with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=5) as client:
        messages: list[Any] = [{"role": "user", "content": f"Tell me about {call.task['task_id']}."}]
        answer = client.chat.completions.create(**asked, messages=messages, max_tokens=16).choices[0].message
        messages += [{"role": "assistant", "content": answer.content or ""}, {"role": "user", "content": "Go on."}]
        client.chat.completions.create(**asked, messages=messages, max_tokens=16)
        other: list[Any] = [{"role": "user", "content": f"Say a word, {number}."}]
        if number == 3:
            with client.chat.completions.create(**asked, messages=other, max_tokens=100, stream=True) as chunks:
                next(chunks)
        else:
            client.chat.completions.create(**asked, messages=other, max_tokens=8)
    return random.Random(call.trial_id.rsplit(".", 1)[1] + str(call.task["task_id"])).random()


def moved() -> Any:
    """Weights that are not those that sampled: so that ratios are not 1, and some are clipped."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


def with_trl(
    groups: list[CollectedGroup], model: Any, collector: Collector, folder: Path
) -> tuple[float, dict[str, Any]]:
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )

    from steno_adapters.trl import AsyncRollouts
    from tests.integration.trl import cpu_attention

    cpu_attention.prepare()
    model.save_pretrained(folder / "model")
    rows = sum(len(group.rows) for group in groups)
    args = AsyncGRPOConfig(
        str(folder / "out"), max_steps=1, per_device_train_batch_size=rows, temperature=TEMPERATURE, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    rollouts = AsyncRollouts(collector)
    trainer = rollouts.trainer(str(folder / "model"), args, processing_class=AutoTokenizer.from_pretrained(TINY))
    cpu_attention.register()
    rollouts.began(0, folder / "out", 1, {})
    rollouts.versions.starts.insert(0, ("base", 0))  # the weights that the worker began with
    for group in groups:
        rollouts._came(group)
    # As the trainer's own loader, which would wait for the batch after this one before it gives it.
    fresh = RolloutQueueDataset(
        rollouts.rollout_buffer, lambda: trainer.model_version, rollouts.check_health, 300.0, defaultdict(list),
        args.max_staleness,
    )  # fmt: skip
    planned = next(iter(FixedCountBatcher(fresh, 1, rows)))
    batch = DataCollatorForRollout(trainer.processing_class.pad_token_id)([planned])
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert rollouts.counts["rows"] == rows and rollouts.rollout_buffer.empty()
    return loss.item(), {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def with_steno(groups: list[CollectedGroup], model: Any, collector: Collector) -> tuple[float, dict[str, Any]]:
    terms = TrainingTerms(VersionHistory((PolicyVersion("base", 0),)), 1, 4096, model.config.vocab_size)
    rows = []
    for group in groups:
        for session in group.lease.trials:
            rows += read_samples(collector.client.samples(session.trial_id), terms, Ledger())
    scored = [ScoredTrial(trial, group.group_id, reward) for group in groups for trial, reward in group.rewards.items()]
    advantages = group_advantages(scored, Estimator.GRPO).by_trial
    weights = token_weights([SampleShare(row.trial_id, row.trained_tokens) for row in rows], Aggregation.TOKEN_MEAN)
    objective = Objective(0.2, 0.2, Mismatch(Correction.OFF), around_sampler=True)
    total = torch.zeros(())
    for row, weight in zip(rows, weights, strict=True):
        logits = model(input_ids=row.token_ids_T[None]).logits[0, :-1] / row.temperatures_T[1:, None]
        logprobs = torch.log_softmax(logits, -1)
        known = Tokens(
            row.sampling_logprobs_T[1:], torch.full((row.tokens - 1,), advantages[row.trial_id]),
            torch.full((row.tokens - 1,), weight), row.loss_mask_T[1:], row.sampling_logprobs_T[1:],
        )  # fmt: skip
        picked = logprobs.gather(-1, row.token_ids_T[1:, None])[:, 0]
        total = total + policy_loss(objective, known, picked, torch.zeros_like(picked)).total
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_loss_and_gradient_of_one_batch_are_those_of_steno_train(stack: Stack, tmp_path: Path) -> None:
    with Collector(stack.url, "equal", agent=talk, temperature=TEMPERATURE) as collector:
        groups = collector.collect([{"task_id": name} for name in ("rain", "snow", "wind")], 4)
        assert len(groups) == 3 and all(len(group.rows) >= 8 for group in groups), "two branches in each trial"
        turns = [turn for group in groups for trial in group.rewards for turn in collector.client.turns(trial)]
        assert any(turn.fork_reason for turn in turns)
        theirs, their_gradient = with_trl(groups, moved(), collector, tmp_path)
        ours, our_gradient = with_steno(groups, moved(), collector)
    assert theirs == pytest.approx(ours, abs=1e-4)
    assert their_gradient.keys() == our_gradient.keys()
    for name, gradient in our_gradient.items():
        torch.testing.assert_close(their_gradient[name], gradient, atol=1e-4, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in our_gradient.values()) > 1e-3
