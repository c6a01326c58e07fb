"""Which rollouts a container belongs to, and whether these still run: what killed ones have left is ended by the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steno_rollouts.trials.containers.engine import LAUNCHER, RUN


@dataclass(frozen=True)
class Launcher:
    """A process: where its number means something (machine since its boot, namespace), the number, and when it began."""

    place: str
    pid: int
    began: str

    @classmethod
    def here(cls) -> Self:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(f"{boot}/{namespace}", os.getpid(), _began(os.getpid()))

    @classmethod
    def of(cls, label: str) -> Self | None:
        """None: no label of ours."""
        place, _, process = label.rpartition("/")
        pid, _, began = process.partition("-")
        return cls(place, int(pid), began) if pid.isdecimal() and began else None

    @property
    def label(self) -> str:
        return f"{self.place}/{self.pid}-{self.began}"

    def has_left(self, labels: Mapping[str, str], run_id: str) -> bool:
        """Whether a container with these labels belongs to nobody. Of rollouts that can't be seen from here, only those of the
        same run are known to be over: one process per run at a time."""
        owner = Launcher.of(labels.get(LAUNCHER, ""))
        if owner is None or owner.place != self.place:
            return labels.get(RUN) == run_id
        return _began(owner.pid) != owner.began


def _began(pid: int) -> str:
    """In clock ticks since boot; "": there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
