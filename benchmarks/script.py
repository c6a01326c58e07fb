"""What the scripted engine says in benchmarks: ` tok` without end, so that `max_tokens` decides; see benchmarks/load.py."""

from __future__ import annotations

from typing import Any


def say(request: dict[str, Any]) -> str:
    return " tok" * 4096
