"""What the scripted engine says to mini-swe-agent: ten shell commands one after the other, then the agreed last one.

A task that says REFUSED has its fourth request refused the first time; one that says CUT loses the fourth answer in its middle.
"""

from __future__ import annotations

import json
from typing import Any

COMMANDS = [
    "pwd",
    "mkdir -p src && ls -la",
    "printf 'def add(a, b):\\n    return a - b\\n' > src/calc.py",
    "cat src/calc.py",
    "python3 -c \"import sys; sys.path.insert(0, 'src'); import calc; print(calc.add(2, 3))\"",
    "sed -i 's/a - b/a + b/' src/calc.py",
    "nl -ba src/calc.py",
    "python3 -c \"import sys; sys.path.insert(0, 'src'); import calc; print(calc.add(2, 3))\"",
    "echo 'naïve café ☕ 漢字 \"quoted\" \\\\ backslash' > notes.txt && cat notes.txt",
    "wc -c src/calc.py notes.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
]


_asked: dict[tuple[str, int], int] = {}


def reply(request: dict[str, Any]) -> dict[str, Any]:
    done = sum(message["role"] == "tool" for message in request["messages"])
    key = (request["trial_id"], done)
    _asked[key] = _asked.get(key, 0) + 1
    task = " ".join(str(message["content"]) for message in request["messages"] if message["role"] == "user")
    if "REFUSED" in task and done == 3 and _asked[key] == 1:
        return {"error": ("no_worker", "nobody is there just now")}
    command = COMMANDS[min(done, len(COMMANDS) - 1)]
    call = {"id": "", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
    message = {"role": "assistant", "content": f"Step {done + 1}: I run the next command.", "tool_calls": [call]}
    if "CUT" in task and done == 3 and _asked[key] == 1:
        message["fail_after_tokens"] = 12
    return message
