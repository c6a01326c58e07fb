"""A rank of `GRPOTrainer` with `PromptRollouts`, for a step: `-m tests.integration.trl.prompt_rank FOLDER`, under torchrun.

FOLDER/job.json has `proxy` and `run`; FOLDER/rank-N.json gets what this rank counted. Ranks end in turn: the first one while the
second has one group that is ready and one that runs.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from steno.models import TINY
from steno_adapters import AgentCall, Collector
from steno_adapters.trl import PromptRollouts
from tests.integration.trl.test_failing import ask

TASKS = [{"task_id": name, "prompt": f"Tell me about {name}."} for name in ("rain", "snow", "hail", "wind")]
FIRST_S, LAST_S = 2.0, 4.0


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    args = GRPOConfig(
        str(folder / "out"), max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rank = PartialState().process_index
    seen: list[str] = []

    def play(call: AgentCall) -> float:
        ask(call)
        if (name := call.task["task_id"]) not in seen:
            seen.append(name)
        if rank == 0:
            time.sleep(FIRST_S)
        elif name != seen[0]:
            time.sleep(LAST_S)
        return float(call.trial_id.rsplit(".", 1)[1])

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with Collector(job["proxy"], job["run"], agent=play) as collector:
        rollouts = PromptRollouts(collector, TASKS)
        rollouts.trainer(model, args, processing_class=AutoTokenizer.from_pretrained(TINY)).train()
    (folder / f"rank-{rank}.json").write_text(json.dumps(rollouts.counts))


if __name__ == "__main__":
    main()
