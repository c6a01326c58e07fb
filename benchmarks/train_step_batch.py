"""The batch of `train_step`, made alike in both environments: torch and the standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RUN = 16
"""Tokens in a row that the policy said, and then as many that a tool did."""


def completions(job: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """(prompt ids, completion ids, which of these are trained, advantage) of each sample."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, tokens in enumerate(job["completions"]):
        prompt = torch.randint(0, job["vocabulary"], (job["prompt"],), generator=generator)
        completion = torch.randint(0, job["vocabulary"], (tokens,), generator=generator)
        trained = (torch.arange(tokens) // RUN % 2 == 0) | job.get("even", False)
        found.append((prompt, completion, trained, [1.0, -1.0, 0.5, -0.5][number % 4]))
    return found


def forget_peak() -> int:
    """Reset the kernel's high-water mark of this process. Returns: bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
