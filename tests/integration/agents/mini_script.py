"""What the scripted engine says to mini-swe-agent: ten shell commands one after the other, then the agreed last one."""

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


def reply(request: dict[str, Any]) -> dict[str, Any]:
    done = sum(message["role"] == "tool" for message in request["messages"])
    command = COMMANDS[min(done, len(COMMANDS) - 1)]
    call = {"id": "", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
    return {"role": "assistant", "content": f"Step {done + 1}: I run the next command.", "tool_calls": [call]}
