"""What the check ran on, without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.sources import ROOT


def machine(facts: dict[str, Any]) -> dict[str, Any]:
    """Args: facts: what the process `facts` found."""
    return {
        "gpus": facts["gpus"], "gpu_memory_bytes": facts["gpu_memory_bytes"],
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), "cpu": _cpu(),
        "cores": os.cpu_count(), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }  # fmt: skip


def revision() -> dict[str, Any]:
    """None: this is no checkout."""
    changed = _said("git", "-C", str(ROOT), "status", "--porcelain")
    return {
        "revision": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted": None if changed is None else bool(changed),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _said(*command: str) -> str | None:
    """None: there is no such command, it failed, or it said nothing in time."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout.strip()
