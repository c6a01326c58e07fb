"""What the scripted engine says behind the container."""

from __future__ import annotations

from typing import Any


def reply(request: dict[str, Any]) -> str:
    return "Recorded."
