"""A verl job on a CPU: its configuration, its own manager and workers, TransferQueue; the model servers are `model_server.py`."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from steno.models import TINY
from steno_adapters.verl.manager import StenoAgentLoopManager
from tests.integration.verl.model_server import ModelServer
from tests.support.programs import mini_agent
from tests.support.programs.ray_start import patient_start

HERE = Path(__file__).parent
PROMPT, RESPONSE = 16_000, 4_000
ONE_WORKER = "actor_rollout_ref.rollout.agent.num_workers=1"
"""Where there is one prompt at a time: a second agent-loop worker would take seconds of a processor and do nothing."""
MINI_SERVER = "MINI_SERVER"
"""Variable with the socket of a server of mini-swe-agent's, which `cluster` starts."""
MANAGER = "steno_adapters.verl.manager.StenoAgentLoopManager"


def verl_config(loop_file: Path | None, *overrides: str) -> Any:
    """As verl's own command line makes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={TINY}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.temperature=0.7",
                "actor_rollout_ref.rollout.n=2",
                f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
                f"actor_rollout_ref.rollout.response_length={RESPONSE}",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "actor_rollout_ref.rollout.agent.default_agent_loop=steno",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop_file or 'null'}",
                f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "algorithm.adv_estimator=grpo",
                "trainer.experiment_name=test",
                *overrides,
            ],
        )


def task_folders(folder: Path, instructions: dict[str, str]) -> Path:
    """Tasks in Harbor's layout, by name."""
    for name, instruction in instructions.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "task.toml").write_text('version = "1.0"\n')
        (folder / name / "instruction.md").write_text(instruction)
    return folder


def loop_file(folder: Path, tasks: Path, **settings: Any) -> Path:
    """The file for `agent_loop_config_path`, and beside it the settings of the agents."""
    more = folder / "agents.yaml"
    variables = {
        "AGENTS": os.environ["STENO_AGENTS_VENV"],
        "MINI": mini_agent.__file__,
        "MINI_SERVER": os.environ.get(MINI_SERVER, ""),
        "MORE": HERE / "more_turns.py",
    }
    given = {
        "tasks": str(tasks),
        "command": ["env", *(f"{name}={value}" for name, value in variables.items()), "sh", str(HERE / "agent.sh")],
        "reward": f"{HERE / 'reward.py'}:score",
        "confine": "off",
        "timeout_s": 480,
        "work_dir": str(folder / "trials"),
        "retries": 0,
    }
    more.write_text(yaml.safe_dump(given | settings))
    entry = {"name": "steno", "_target_": "steno_adapters.verl.loop.RemoteAgentLoop", "settings": str(more)}
    path = folder / "loop.yaml"
    path.write_text(yaml.safe_dump([entry]))
    return path


class VerlJob:
    """Args: server: options of `ModelServer`. Needs Ray and TransferQueue to be up (`cluster`)."""

    def __init__(self, config: Any, **server: Any) -> None:
        self.config = config
        self.server = ModelServer.remote(**server)
        balancer = get_router_handle({"cpu-0": self.server})
        self.client = LLMServerClient(config, load_balancer_handle=balancer)
        self.manager = StenoAgentLoopManager.create(config=config, llm_client=self.client)

    @property
    def workers(self) -> list[Any]:
        return list(self.manager.agent_loop_workers)

    @property
    def facts(self) -> Any:
        return self.manager.facts

    def submit(self, names: Sequence[str], *, validate: bool = False, step: int = 1) -> list[str]:
        """As verl's trainer does. Returns: uids, by task."""
        uids = [str(uuid.uuid4()) for _ in names]
        rows: dict[str, Any] = {
            "uid": np.array(uids, dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": name}] for name in names], dtype=object),
            "extra_info": np.array([{"task_id": name, "index": i} for i, name in enumerate(names)], dtype=object),
            "data_source": np.array(["steno"] * len(names), dtype=object),
            "reward_model": np.array([{"ground_truth": ""}] * len(names), dtype=object),
            "index": np.array(range(len(names)), dtype=object),
            "dummy_tensor": torch.zeros(len(names), 1, dtype=torch.uint8),
        }
        batch = tu.get_tensordict(rows)
        tu.assign_non_tensor_data(batch, "global_steps", step)
        if validate:
            tu.assign_non_tensor_data(batch, "validate", True)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in names]
        tq.kv_batch_put(keys=uids, partition_id="val" if validate else "train", tags=tags)
        self.manager.generate_sequences(batch)
        return uids

    def ended(self, uids: Sequence[str], *, partition: str = "train", within_s: float = 540) -> dict[str, str]:
        """Wait for the sessions of these prompts. Returns: the status of each."""
        until = time.monotonic() + within_s
        while True:
            tags = tq.kv_list(partition)[partition]
            found = {uid: tags[uid]["status"] for uid in uids}
            if set(found.values()) <= {"finished", "failure"}:
                return found
            assert time.monotonic() < until, f"not ended: {found}\n{ray_logs()}"
            time.sleep(0.2)

    @staticmethod
    def keys(uid: str, partition: str = "train") -> list[str]:
        return sorted(key for key in tq.kv_list(partition)[partition] if key.startswith(f"{uid}_"))

    @staticmethod
    def row(key: str, partition: str = "train") -> dict[str, Any]:
        """What TransferQueue has under this key: tensors as numpy's, without their first dimension."""
        found = tq.kv_batch_get(keys=[key], partition_id=partition)
        row = {}
        for name in sorted(found.keys()):
            value = found.get(name)
            row[name] = value[0].numpy() if isinstance(value, torch.Tensor) else tu.get(found, name)[0]
        return row

    def cancel_session(self, uid: str, session: int) -> None:
        """verl's own task of it."""
        found = [ray.get(worker.__ray_call__.remote(_cancel_session, uid, session)) for worker in self.workers]
        assert sum(found) == 1

    def kill_workers(self) -> None:
        kill(self.workers)

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        ray.kill(self.server)
        ray.kill(self.manager._job)


def kill(actors: Sequence[Any]) -> None:
    """SIGKILL to the actors' processes. With `ray.kill`, a worker first ends the programs it has started, and waits for them."""
    found = [psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))) for actor in actors]
    for process in found:
        process.kill()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert not alive


def _cancel_session(worker: Any, uid: str, session: int) -> bool:
    """In an agent-loop worker, in another thread than its event loop's. Arguments say whose a task is: verl has no list."""
    for prompt in list(worker.background_tasks):
        loop = prompt.get_loop()
        for task in asyncio.all_tasks(loop):
            frame = getattr(task.get_coro(), "cr_frame", None)
            for given in frame.f_locals.values() if frame is not None else ():
                if isinstance(given, dict) and (given.get("uid"), given.get("session_id")) == (uid, session):
                    loop.call_soon_threadsafe(task.cancel)
                    return True
    return False


def clear_rows() -> None:
    """Forget what jobs before have put into TransferQueue."""
    for partition, tags in tq.kv_list().items():
        if tags:
            tq.kv_clear(keys=list(tags), partition_id=partition)


def ray_logs() -> str:
    """The ends of what workers printed."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]
    return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(logs.glob("worker-*.err")))


def start_cluster() -> None:
    """Ray and TransferQueue, on this machine alone."""
    os.environ |= {
        "TRANSFER_QUEUE_ENABLE": "1",
        "RAY_worker_niceness": "0",  # else what else runs here comes first
    }
    patient_start()
    # "local": another cluster on this machine is somebody else's
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
