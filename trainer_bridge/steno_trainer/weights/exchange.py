"""Broadcast and gather of small objects between ranks while weights are sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from steno.contracts.errors import StenoError
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import PushFailed, TrainerError


class GlooExchange:
    """Collectives on the gloo group, which is patient. Args: ranks: None: this process alone."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.rank = ranks.rank if ranks else 0
        self.size = ranks.size if ranks else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, act: Callable[[], Any], *, failure: type[TrainerError] = PushFailed) -> Any:
        """Run `act` on the first rank alone, and return its result, as JSON carries it, on all ranks.

        Raises: `failure`, on all ranks: `act` raised OSError, StenoError or TimeoutError.
        """
        told: dict[str, Any] = {}
        if self.is_first:
            try:
                told = {"made": act()}
            except (OSError, StenoError, TimeoutError) as error:
                told = {"problem": str(error)}
        if self._ranks is not None:
            told = json.loads(self._ranks.share(json.dumps(told).encode() if self.is_first else None))
        if "problem" in told:
            raise failure(told["problem"])
        return told["made"]

    def gather(self, mine: Any) -> list[Any] | None:
        """The objects of all ranks, by rank, on the first one; None on the others."""
        if self._ranks is None or self.size == 1:
            return [mine]
        everything: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(mine, everything, dst=0, group=self._ranks.control)
        return everything

    def everywhere(self, mine: Any) -> list[Any]:
        """The objects of all ranks, by rank, on all ranks."""
        if self._ranks is None or self.size == 1:
            return [mine]
        everything: list[Any] = [None] * self.size
        dist.all_gather_object(everything, mine, group=self._ranks.control)
        return everything


def beside_first(ranks: Ranks | None) -> list[int]:
    """The ranks on the first one's machine, which share its disks. A collective."""
    hosts = GlooExchange(ranks).everywhere(socket.gethostname())
    return [rank for rank, host in enumerate(hosts) if host == hosts[0]]
