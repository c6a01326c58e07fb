"""What tests of the step share: random models, batches, and starting ranks as processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.ports import free_port
from trainer_bridge.batch import Row
from trainer_bridge.orders import Batch
from trainer_bridge.staleness import Verdict

VOCABULARY = 97
SLOW_S = 300.0
"""Seconds that a start of ranks may take on a machine that others use too."""


def random_model(
    folder: Path, *, tied: bool = False, heads: int = 4, groups: int = 2, layers: int = 2, seed: int = 0
) -> Path:
    """A Qwen3 with random weights, larger than its own initialisation: so that log-probabilities differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=32, tie_word_embeddings=tied, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def random_batch(seed: int = 0, *, trials: int = 6, longest: int = 40, scale: float = 1.0) -> Batch:
    """Rows of uneven lengths and of two completions each, some trials with two; advantages of both signs, times `scale`."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, advantages = [], {}
    for trial in range(trials):
        for _ in range(rng.choice([1, 1, 2])):
            tokens = rng.randint(6, longest)
            mask = torch.rand(tokens, generator=generator) < 0.5
            mask[0], mask[-1] = False, True
            rows.append(
                Row(
                    trial_id=f"t{trial}", group_id="g", leaf_id=f"{len(rows)}", reward=0.0,
                    token_ids_T=torch.randint(0, VOCABULARY, (tokens,), generator=generator),
                    loss_mask_T=mask,
                    sampling_logprobs_T=torch.where(mask, -4.6 + torch.randn(tokens, generator=generator), torch.nan),
                    temperatures_T=torch.full((tokens,), rng.choice([0.7, 1.0])),
                    version_T=torch.where(mask, 0, -1), versions=(f"a/{trial % 2}",), verdict=Verdict(None),
                    completion_starts=(1, tokens // 3),
                )
            )  # fmt: skip
        advantages[f"t{trial}"] = rng.choice([-1.0, 1.0]) * (0.5 + rng.random()) * scale
    return Batch(rows, advantages)


def start_ranks(count: int, module: str, *arguments: str, launcher: str = "torchrun") -> subprocess.Popen[str]:
    """`module` in `count` processes under a launcher, or one plain process. End it with `end`."""
    command = [sys.executable, "-m", module, *arguments]
    if launcher == "deepspeed":
        command = [
            str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(count), "--master_addr",
            "127.0.0.1", "--master_port", str(free_port()), "--no_local_rank", "--module", module, *arguments,
        ]  # fmt: skip
    elif count > 1:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-addr", "127.0.0.1",
            "--master-port", str(free_port()), "-m", module, *arguments,
        ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    if launcher == "deepspeed":  # the launcher itself looks for devices, too
        environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill it and its ranks, at once: torchrun starts them in sessions of their own, and they outlive it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for started in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                started.kill()
    process.wait()


def run_ranks(count: int, job: dict[str, Any], folder: Path, *, launcher: str = "torchrun") -> Any:
    """Carry out a job (see `rank.py`) and return what the first rank saved."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    process = start_ranks(count, "tests.integration.trainer.rank", str(folder), launcher=launcher)
    try:
        output, _ = process.communicate(timeout=SLOW_S)
    finally:
        end(process)
    assert process.returncode == 0, output
    return torch.load(folder / "result.pt", weights_only=False)
