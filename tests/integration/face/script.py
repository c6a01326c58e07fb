"""What the scripted engine says in these tests: one tool call, then an answer; "branch" answers at once."""

from __future__ import annotations

from typing import Any


def reply(request: dict[str, Any]) -> Any:
    if not request["messages"]:  # a plain completion
        return "Indeed."
    last = request["messages"][-1]
    if last["role"] == "user" and "call" in last["content"]:
        return {"tool_calls": [{"id": "", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}]}
    return f"You said {last['content']!r}."
