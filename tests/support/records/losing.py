"""Stores that forget what they had confirmed of a trial, as after a failover that loses it or a restart from a snapshot."""

from __future__ import annotations

import copy
from typing import Any

from steno_proxy.store.memory.recording import MemoryRecording
from steno_proxy.store.memory.store import MemoryStore
from tests.support.machine.redis_server import RedisServer


class LosingStore(MemoryStore):
    """`mark` a trial's state, and `lose` what has come since. Proxies go on as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[str, MemoryRecording] = {}

    def mark(self, trial_id: str) -> None:
        self._marked[trial_id] = copy.deepcopy(self._recordings[trial_id])

    def lose(self, trial_id: str) -> None:
        self._recordings[trial_id] = copy.deepcopy(self._marked[trial_id])


class LosingRedis:
    """The same of a real Redis, without restarting it."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._marked: dict[str, dict[bytes, Any]] = {}

    def mark(self, trial_id: str) -> None:
        with self._server.client() as client:
            self._marked[trial_id] = {key: client.dump(key) for key in client.keys(_keys(trial_id))}

    def lose(self, trial_id: str) -> None:
        with self._server.client() as client:
            client.delete(*client.keys(_keys(trial_id)))
            for key, dumped in self._marked[trial_id].items():
                client.restore(key, 0, dumped)


def _keys(trial_id: str) -> str:
    return f"steno:{{{trial_id}}}:*"
