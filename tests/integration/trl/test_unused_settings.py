"""Settings that TRL's own rollouts alone would read: the trainers of this adapter refuse them, and pass those nobody touched."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from steno.contracts.errors import BadRequest
from steno_adapters.trl import AsyncRollouts, PromptRollouts
from steno_adapters.trl.unused_settings import UNUSED_BY_ASYNC, UNUSED_BY_PROMPTS, check_unused

pytestmark = pytest.mark.trl

TASKS = [{"task_id": "a", "prompt": "Hello."}]
BOTH = [(UNUSED_BY_ASYNC, AsyncGRPOConfig, AsyncGRPOTrainer), (UNUSED_BY_PROMPTS, GRPOConfig, GRPOTrainer)]


@pytest.mark.parametrize(("unused", "config", "trainer"), BOTH)
def test_each_of_them_is_trls_and_its_default_passes(
    unused: dict[str, str], config: Any, trainer: Any, tmp_path: Path
) -> None:
    known = {field.name for field in dataclasses.fields(config)} | set(inspect.signature(trainer).parameters)
    assert unused.keys() <= known
    args = config(str(tmp_path), max_steps=3, use_cpu=True, bf16=False, temperature=0.7)
    check_unused(unused, args, {"callbacks": []}, 4)


@pytest.mark.parametrize(
    ("rollouts", "config", "changes", "options", "name"),
    [
        (AsyncRollouts, AsyncGRPOConfig, {"num_generations": 16}, {}, "num_generations"),
        (AsyncRollouts, AsyncGRPOConfig, {"max_completion_length": 512}, {}, "max_completion_length"),
        (AsyncRollouts, AsyncGRPOConfig, {"chat_template_kwargs": {"thinks": False}}, {}, "chat_template_kwargs"),
        (AsyncRollouts, AsyncGRPOConfig, {}, {"reward_funcs": len}, "reward_funcs"),
        (PromptRollouts, GRPOConfig, {"top_p": 0.9}, {}, "top_p"),
        (PromptRollouts, GRPOConfig, {"generation_kwargs": {"seed": 1}}, {}, "generation_kwargs"),
        (PromptRollouts, GRPOConfig, {}, {"tools": [len]}, "tools"),
    ],
)
def test_what_rollouts_do_not_use_their_trainer_refuses(
    rollouts: Any, config: Any, changes: dict[str, Any], options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    args = config(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, **changes)
    with pytest.raises(BadRequest, match=f"{name}: got .*, must be"):
        rollouts(None, TASKS).trainer("no-model", args, **options)
