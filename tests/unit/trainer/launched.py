"""An environment as torchrun makes it for one of two ranks."""

from __future__ import annotations

import pytest


def launched(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    told = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
