"""The processes of a training run: who this one is, and how ranks tell each other small things.

Owns the process groups. There are two: the default one (NCCL on GPUs) carries DeepSpeed's collectives and must never wait long,
since a kernel that waits holds the device; `control` is gloo, waits for as long as data takes to come, and carries all that
the first rank says and all that is counted.

Started by torchrun, by the deepspeed launcher, or plainly as one process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steno.contracts.errors import ConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a rank that a launcher has started."""


@dataclass(frozen=True)
class Ranks:
    """rank, size: this process' number, and how many there are. sequence_size: how many neighbouring ranks share each sample.
    sequence: their process group, in which this one is the `sequence_rank`-th; None: samples are not cut."""

    rank: int
    size: int
    device: torch.device
    control: Any
    sequence_size: int = 1
    sequence: Any = None

    @classmethod
    def open(
        cls, device: str = "auto", *, sequence_size: int = 1, wait_s: float = 86400.0, collective_s: float = 1800.0
    ) -> Ranks:
        """Join the others. To be called once, before anything imports deepspeed. All ranks return together.

        Raises: ConfigError: no such device; a sequence_size that does not divide the ranks; as `is_launched`.
        """
        launched = is_launched()
        rank, size, local_rank = (
            int(os.environ[name]) if launched else 0 for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        size = size or 1
        if size % sequence_size:
            raise ConfigError(
                f"sequence_parallel: {size} ranks can't be divided into groups of {sequence_size}",
                field="sequence_parallel",
            )
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if kind == "cuda" and local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {rank} needs GPU {local_rank}, but this machine has {torch.cuda.device_count()} GPUs",
                field="device",
            )
        _tell_deepspeed(kind, rank, size, local_rank)
        if kind == "cuda":
            torch.cuda.set_device(local_rank)
        where = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
        backend = "nccl" if kind == "cuda" else "gloo"
        timeout = timedelta(seconds=collective_s)
        if launched:
            _end_with_the_launcher()
        if not launched:  # alone, so that no port is needed
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        sequence = None
        if sequence_size > 1:
            # Every rank must make every group, also those that it is not in.
            for first in range(0, size, sequence_size):
                group = dist.new_group(list(range(first, first + sequence_size)), timeout=timeout)
                sequence = group if first <= rank < first + sequence_size else sequence
        return cls(rank, size, where, control, sequence_size, sequence)

    @property
    def first(self) -> bool:
        """Whether this rank has the data, says what is next, and writes what is written once."""
        return self.rank == 0

    @property
    def packs(self) -> int:
        """How many micro-batches run at once."""
        return self.size // self.sequence_size

    @property
    def pack(self) -> int:
        """Which of them this rank takes part in."""
        return self.rank // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    def share(self, payload: bytes | None) -> bytes:
        """What the first rank passes, on all ranks; the others pass None and wait here. A collective."""
        size = torch.tensor([len(payload) if self.first and payload is not None else 0])
        dist.broadcast(size, 0, group=self.control)
        if self.first and payload is not None:
            data = (
                torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                if payload
                else torch.empty(0, dtype=torch.uint8)
            )
        else:
            data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            dist.broadcast(data, 0, group=self.control)
        return data.numpy().tobytes()

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, on the CPU; all ranks get the same bits. A collective."""
        total = tensor.detach().cpu().clone()
        dist.all_reduce(total, group=self.control)
        return total

    def add_shared(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share this one's micro-batch, on the device. A collective of these."""
        total = tensor.detach().clone()
        if self.sequence is not None:
            dist.all_reduce(total, group=self.sequence)
        return total

    def maximum(self, tensor: Tensor) -> Tensor:
        """The element-wise maximum over ranks, on the CPU. A collective."""
        largest = tensor.detach().cpu().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return largest

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def close(self) -> None:
        """Leave; not needed where the process ends by an error, since the others see its sockets close."""
        dist.destroy_process_group()


def is_launched() -> bool:
    """Whether a launcher has said which rank this process is; else it is alone.

    Raises: ConfigError: there are several processes, and each would take itself for the only one: names the missing variables.
    """
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"{', '.join(missing)}: got nothing, must be set, since WORLD_SIZE is {os.environ['WORLD_SIZE']}: a launcher sets "
            f"{', '.join(LAUNCHED)}, as torchrun does",
            field=missing[0],
        )
    return not missing


def _end_with_the_launcher() -> None:
    """torchrun starts ranks in sessions of their own: killed at once (out of memory, kill -9), it would leave them training and
    pushing beside the run that takes its place. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _tell_deepspeed(kind: str, rank: int, size: int, local_rank: int) -> None:
    """What deepspeed reads at its import. It guesses the accelerator otherwise, and counts sockets as CPU devices."""
    if "deepspeed" in sys.modules and os.environ.get("DS_ACCELERATOR", kind) != kind:
        raise ConfigError(f"deepspeed is set up for {os.environ['DS_ACCELERATOR']} already", field="device")
    os.environ["DS_ACCELERATOR"] = kind
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local_rank)):
        os.environ.setdefault(name, str(value))
    if kind == "cpu":
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
