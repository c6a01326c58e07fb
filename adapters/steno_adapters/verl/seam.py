"""All that is asked of verl and of TransferQueue: names that no release promises to keep.

Nothing else here imports either of them, and nothing of theirs is changed. `tests/integration/verl/test_seam.py` fails where a
release has other names.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from steno_adapters.verl import check_versions

check_versions()

import transfer_queue  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput  # noqa: E402
from verl.trainer.ppo import padding_utils  # noqa: E402
from verl.trainer.ppo.v1 import AgentLoopManagerTQ  # noqa: E402
from verl.utils.fs import copy_to_local  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerClient  # noqa: E402

__all__ = [
    "ABORTED",
    "AgentLoopBase",
    "AgentLoopManagerTQ",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "LLMServerClient",
    "attempt",
    "is_validation",
    "let_padding_be_logged",
    "model_files",
    "unfinished",
]

ABORTED = ("abort", "aborted")
"""`stop_reason` of an answer that verl's servers broke off, since new weights come."""
VALIDATION, TRAINING = "val", "train"
"""Partitions of TransferQueue. Before verl starts the sessions of a prompt it puts the prompt's uid into one of them."""
OPEN = ("pending", "running")
"""Values of the tag `status` of a prompt whose sessions have not all ended."""


async def attempt(servers: LLMServerClient, request_id: str, ids: list[int], sampling: dict[str, Any]) -> Any:
    """One answer of verl's servers, as `TokenOutput`. The method of the base class: a subclass that resumes what was aborted
    would merge the parts, and hide which weights sampled which."""
    return await LLMServerClient.generate(servers, request_id, prompt_ids=ids, sampling_params=sampling)


async def is_validation(uid: str) -> bool:
    """Whether the sessions of this prompt are for validation, which verl does not tell an agent loop."""
    return uid in await _tags(VALIDATION)


def let_padding_be_logged() -> None:
    """Show in this process, the trainer's, how many rows without a token verl adds to a batch: verl logs it at a level that is
    not shown by default."""
    padding_utils.logger.setLevel(logging.INFO)


def model_files(model: Any) -> str:
    """Where the configuration of `actor_rollout_ref.model` is on this machine, or its name at the hub. Blocking: verl copies what
    is at hdfs:// once."""
    return str(copy_to_local(str(model.get("hf_config_path") or model.path), use_shm=bool(model.get("use_shm", False))))


async def unfinished(uids: Collection[str]) -> set[str]:
    """Of these prompts for training, those whose sessions have not all handed over their rows."""
    tags = await _tags(TRAINING)
    return {uid for uid in uids if tags.get(uid, {}).get("status") in OPEN}


async def _tags(partition: str) -> dict[str, dict[str, Any]]:
    listed = await transfer_queue.async_kv_list(partition_id=partition) or {}
    found: dict[str, dict[str, Any]] = listed.get(partition, {})
    return found
