"""What the scripted engine says in benchmarks/aworld.py: a short answer, after as many seconds as the last message asks for."""

from __future__ import annotations

from typing import Any


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """The last message is `generate <seconds>`."""
    delay_s = float(str(request["messages"][-1]["content"]).split()[1])
    return {"content": "I will look further.", "delay_s": delay_s}
