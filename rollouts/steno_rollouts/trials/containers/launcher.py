"""Which rollouts a container belongs to, and whether these still run: what killed ones have left is ended by the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

from steno_rollouts.trials import proc
from steno_rollouts.trials.containers.engine import LAUNCHER


@dataclass(frozen=True)
class Launcher:
    """A launcher's process. place: machine since its boot, and PID namespace, in which `pid` is unique. began: its start."""

    place: str
    pid: int
    began: str

    @classmethod
    def here(cls) -> Self:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(f"{boot}/{namespace}", os.getpid(), proc.began(os.getpid()))

    @classmethod
    def of(cls, label: str) -> Self | None:
        """None: no label of ours."""
        place, _, process = label.rpartition("/")
        pid, _, began = process.partition("-")
        return cls(place, int(pid), began) if pid.isdecimal() and began else None

    @property
    def label(self) -> str:
        return f"{self.place}/{self.pid}-{self.began}"

    @property
    def name(self) -> str:
        """Short, for claims."""
        return f"{_digest(self.place)}-{self.pid}-{self.began}"

    def knows_gone(self, name: str) -> bool:
        """Whether the launcher of this name ran where this one does, and has ended."""
        place, _, process = name.partition("-")
        pid, _, began = process.partition("-")
        return place == _digest(self.place) and pid.isdecimal() and proc.began(int(pid)) != began

    def has_left(self, labels: Mapping[str, str]) -> bool:
        """Whether a container with these labels belongs to nobody: its rollouts ran where these do, or before this machine was
        started, and have ended. What others have left is ended when their trials are claimed."""
        owner = Launcher.of(labels.get(LAUNCHER, ""))
        if owner is None:
            return False
        if owner.place == self.place:
            return proc.began(owner.pid) != owner.began
        return owner.place.partition("/")[0] != self.place.partition("/")[0]


def _digest(place: str) -> str:
    return blake2b(place.encode(), digest_size=6).hexdigest()
