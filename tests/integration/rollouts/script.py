"""What the scripted engine says in these tests: it follows the demo's notes to the code word, as the tiny model would."""

from __future__ import annotations

import re
from typing import Any


def reply(request: dict[str, Any]) -> Any:
    last = str(request["messages"][-1]["content"])
    if "wait" in last:
        return {"content": "…", "delay_s": 600.0}
    path = re.search(r"notes/\w+\.txt", last)
    if path:
        arguments = {"path": path[0]}
        return {
            "tool_calls": [{"id": "", "type": "function", "function": {"name": "read_note", "arguments": arguments}}]
        }
    return last
