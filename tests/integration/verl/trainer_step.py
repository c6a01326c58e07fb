"""verl's own training step on a CPU: its V1 trainer, its actor worker, its FSDP2 engine, its loss, its optimizer.

One process is the trainer and its one worker, on gloo. Not verl's: the platform (`cpu_platform.py`, by verl's registry), and the
way to the model servers, which have another one where there are GPUs.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed
import transfer_queue as tq
from numpy.typing import NDArray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.support.programs.ports import free_port

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.integration.verl.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",  # the name under which its FSDP engine is registered
}
"""Of the process that trains."""
OVERRIDES = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
)
"""What a CPU asks for: no flash attention, no packing, float32."""


class OneWorker:
    """In the place of verl's group of workers: its calls, in this process."""

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self._worker = worker
        self._dispatch_info = {"actor": [0]}  # verl's name for which ranks have which part of a batch
        self.updates: dict[str, list[float]] = {}

    def compute_log_prob(self, batch: Any) -> Any:
        return self._worker.compute_log_prob(batch)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._worker.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._worker.load_checkpoint(*args, **kwargs)

    def update_actor(self, batch: Any) -> Any:
        output = self._worker.update_actor(batch)
        self.updates = {name: list(output["metrics"][name]) for name in ("loss", "grad_norm")}
        return output


@ray.remote(num_cpus=0)
class TrainerStep:
    """Args: config: verl's, whole."""

    def __init__(self, config: Any) -> None:
        torch.set_num_threads(1)
        tq.init()
        os.environ |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        torch.distributed.init_process_group("cpu:gloo")
        self._worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        self._worker.init_model()
        self._trainer = PPOTrainerSync(config)
        self._trainer.global_steps = 1
        self._trainer.curr_step_profile = False
        self._trainer._init_tokenizer()
        self._trainer.actor_rollout_wg = self._workers = OneWorker(self._worker)
        self._trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self._trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)

    def begin(self, agent_loop_workers: list[Any]) -> int:
        """As verl's trainer begins: its data, and its newest checkpoint if there is one. Returns: the step it has."""
        self._trainer._init_dataloader()
        self._trainer._load_checkpoint()
        manager = object.__new__(AgentLoopManagerTQ)  # the workers are there
        manager.agent_loop_workers = agent_loop_workers
        self._trainer.agent_loop_manager = manager
        return int(self._trainer.global_steps)

    def submit(self) -> int:
        """Begin the next step: its prompts are played from now on. Returns: its number."""
        self._trainer.global_steps += 1
        self._trainer.prepare_step()
        return int(self._trainer.global_steps)

    def save(self) -> None:
        self._trainer._save_checkpoint()

    def step(self, prompts: int) -> dict[str, Any]:
        """A step on what TransferQueue has. Returns: its metrics, and `updates`: loss and norm of the gradient of each update."""
        metrics: dict[str, Any] = {}
        batch = self._trainer._step_once(metrics, {}, prompts)
        return {"keys": batch.keys, "updates": self._workers.updates, **metrics}

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """As verl's actor hands them to its servers."""
        tensors, _ = self._worker.actor.engine.get_per_tensor_param()
        return {name: tensor.float().numpy() for name, tensor in tensors}
