"""Workers as `GET /workers` shows them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from steno.contracts.wire.frames import ModelCard
from steno.contracts.worker_view import Load, WorkerView


def worker_view(worker_id: str, *models: ModelCard, **changed: Any) -> WorkerView:
    """A worker that is connected, healthy and idle, but for what is named."""
    view = WorkerView(
        worker_id, list(models), Load(0, 0, 0.0), in_flight=0, max_streams=8, connected=True, healthy=True, draining=False,
        since=1.0, idle_s=0.0,
    )  # fmt: skip
    return replace(view, **changed)
