"""The batch of `train_step`, made alike in both environments: torch and the standard library only."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RUN = 16
"""Tokens in a row that the policy said, and then as many that a tool did."""


TRIALS, PROMPT_SHARE, TURNS = 8, 0.6, 4
"""Of a group: its trials, of each path the part that is the prompt, and the turns of the rest."""
SHARED = {"none": 0.0, "half": 0.5, "turn": 1 - 1 / TURNS}
"""How much of what follows the prompt the two branches of a trial have in common."""


class Sample(NamedTuple):
    """trained: which of the completion's ids are. trial: its number."""

    prompt: Tensor
    completion: Tensor
    trained: Tensor
    advantage: float
    trial: int


def group(job: dict[str, Any]) -> list[Sample]:
    """A group of `TRIALS` with one prompt, and two branches of each: paths of job["path"] tokens. What the two share is trained
    in the first one only, as in a recorded session."""
    generator = torch.Generator().manual_seed(0)

    def ids(tokens: int) -> Tensor:
        return torch.randint(0, job["vocabulary"], (tokens,), generator=generator)

    prompt = ids(int(PROMPT_SHARE * job["path"]))
    rest = job["path"] - len(prompt)
    common = int(SHARED[job["shared"]] * rest)
    found = []
    for trial in range(TRIALS):
        stem, advantage = ids(common), [1.0, -1.0, 0.5, -0.5][trial % 4]
        for branch in range(2):
            completion = torch.cat([stem, ids(rest - common)])
            trained = (torch.arange(rest) // RUN % 2 == 0) & ((torch.arange(rest) >= common) | (branch == 0))
            found.append(Sample(prompt, completion, trained, advantage, trial))
    return found


def completions(job: dict[str, Any]) -> list[Sample]:
    """The samples of the batch: of a group, or each a trial with a prompt of its own."""
    if "path" in job:
        return group(job)
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, tokens in enumerate(job["completions"]):
        prompt = torch.randint(0, job["vocabulary"], (job["prompt"],), generator=generator)
        completion = torch.randint(0, job["vocabulary"], (tokens,), generator=generator)
        trained = (torch.arange(tokens) // RUN % 2 == 0) | job.get("even", False)
        found.append(Sample(prompt, completion, trained, [1.0, -1.0, 0.5, -0.5][number % 4], number))
    return found


def forget_peak() -> int:
    """Reset the kernel's high-water mark of this process. Returns: bytes resident now, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
