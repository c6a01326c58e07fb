"""TRL's side of `train_step`, run in TRL's own environment: GRPOTrainer as it is, given completions instead of making them.
Prints one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.packing import TreeRow

from benchmarks.train_step_batch import completions, forget_peak, peak


class Fixed(GRPOTrainer):
    """Its batch is made before, and everything after generation is TRL's."""

    job: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        samples = completions(self.job)
        pad = torch.nn.utils.rnn.pad_sequence
        real = [torch.ones(len(sample.completion), dtype=torch.long) for sample in samples]
        prompts = torch.stack([sample.prompt for sample in samples])
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": pad([sample.completion for sample in samples], batch_first=True),
            "completion_mask": pad(real, batch_first=True),
            "tool_mask": pad([sample.trained.long() for sample in samples], batch_first=True),
            "advantages": torch.tensor([sample.advantage for sample in samples]),
            "num_items_in_batch": torch.tensor(sum(int(sample.trained.sum()) for sample in samples)),
        }


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.rest = 0
        self._started = self._spent = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.rest = forget_peak()
        self._started, self._spent = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.cpu.append(time.process_time() - self._spent)


def tree_tokens(job: dict[str, Any]) -> int:
    """How many tokens AsyncGRPO would compute of the batch, as one row."""
    row = TreeRow()
    for sample in completions(job):
        ids = torch.cat([sample.prompt, sample.completion])
        mask = torch.cat([torch.zeros(len(sample.prompt), dtype=torch.bool), sample.trained])
        row.add({"input_ids": ids, "completion_mask": mask, "group_id": 0})
    return len(row.tokens)


def main(job: dict[str, Any]) -> None:
    samples = completions(job)
    count = len(samples)
    arguments = GRPOConfig(
        output_dir=f"{job['folder']}/trl", use_cpu=True, bf16=False, seed=0, max_steps=job["steps"] + 1,
        per_device_train_batch_size=1, gradient_accumulation_steps=count, num_generations=count,
        learning_rate=1e-6, lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, temperature=1.0, gradient_checkpointing=True,
        max_completion_length=max(len(sample.completion) for sample in samples), logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, mask_truncated_completions=False,
    )  # fmt: skip
    clock = Clock()
    trainer = Fixed(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * count}),
        processing_class=AutoTokenizer.from_pretrained(job["tokenizer"]),
        callbacks=[clock],
    )
    trainer.job = job
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    found = {
        "tree_tokens": tree_tokens(job),
        "step_s": statistics.median(clock.seconds[1:]),
        "cpu_s": statistics.median(clock.cpu[1:]),
        "seconds": clock.seconds,
        "grad_norms": norms,
    }
    print(json.dumps(found | {"rest_bytes": clock.rest, "peak_bytes": peak()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
