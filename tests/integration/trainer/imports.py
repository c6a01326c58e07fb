"""What ranks import, and what DeepSpeed finds out about the machine: done once, by the process that they are forked from.

`deepspeed.initialize` imports torch's compiler for an optimizer that we do not use (Muon).
"""

from __future__ import annotations

import gc
from pathlib import Path

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import tests.integration.trainer.rank
import tests.integration.weights.rank  # noqa: F401

assert deepspeed.ops.__compatible_ops__, "it asks compilers at the first look, and keeps their answers"
assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has no other thread than the one that forked"
gc.freeze()  # forks look for garbage in what is their own
