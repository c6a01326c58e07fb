"""What sends spans, as `traces.py` uses it and `otlp.py` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

UNSENT = -1
"""In place of a status: these spans can't be sent at all. They are too large, say."""


class Exporter(Protocol):
    """Sends spans."""

    def send(self, spans: Sequence[ReadableSpan]) -> int | None:
        """Returns: None: they were taken; else the HTTP status that refused them, 0 where nobody answered, or UNSENT."""
        ...

    def close(self) -> None:
        """Also ends a `send` that waits."""
        ...
