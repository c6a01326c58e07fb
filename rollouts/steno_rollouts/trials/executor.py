"""What runs a trial's command: one small protocol. `local.py` runs processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrialJob:
    """One attempt at a trial. folder: the trial's own, for what the executor has to remember of it and for `stdout.log` and
    `stderr.log`; workdir: inside it, where the command runs. timeout_s: None: no limit."""

    trial_id: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    workdir: Path
    timeout_s: float | None = None

    @property
    def stdout(self) -> Path:
        return self.folder / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.folder / "stderr.log"


@dataclass(frozen=True)
class Exit:
    """How a job ended. code: its exit status; -N, or 128 + N where it was
    confined: by signal N; None: it never ran, and `error` says why."""

    code: int | None
    timed_out: bool = False
    error: str = ""


class Executor(Protocol):
    async def run(self, job: TrialJob) -> Exit:
        """Run it to its end, or to its time limit; then nothing of it runs any more. Cancelled: the same, at once."""
        ...

    async def clear(self, folder: Path) -> None:
        """End what rollouts that were killed have left running of the trial with this folder. Idempotent."""
        ...
