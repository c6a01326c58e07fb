"""What the scripted engine says to an agent that it knows nothing about: it finds the tool that runs a command by its schema, and
works through a dozen turns with single and parallel calls, odd texts and reasoning.

A task that says REFUSED has its fourth answer refused the first time; one that says CUT loses it in its middle.
"""

from __future__ import annotations

import json
import re
from typing import Any

COMMANDS = [
    ["pwd"],
    ["mkdir -p src && printf 'def add(a, b):\\n    return a - b\\n' > src/calc.py"],
    ["cat src/calc.py", "wc -c src/calc.py"],
    ["sed -i 's/a - b/a + b/' src/calc.py"],
    ["cat no-such-file"],
    ["""echo 'naïve café ☕ 漢字 "quoted" \\\\ backslash'"""],
    ["true"],
    ["nl -ba src/calc.py", "ls src", "echo three at once"],
    ["echo '<tag> & </tag>'"],
    ["ls -la"],
    ["echo done"],
]
CUT_TOKENS = 60
"""Behind the text, in the middle of the call."""
_FIELDS = ("command", "cmd", "script", "input")
_RUNS = re.compile(r"bash|shell|exec|terminal|command", re.IGNORECASE)
_asked: dict[tuple[str, int], int] = {}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def shell(tools: list[dict[str, Any]]) -> tuple[str, str, dict[str, Any]]:
    """The tool that runs a command: its name, the field for the command, and what else it requires."""
    for tool in sorted(tools, key=lambda tool: _RUNS.search(tool["function"]["name"]) is None):
        schema = tool["function"]["parameters"]
        for field in _FIELDS:
            if field in schema["properties"]:
                required = [name for name in schema.get("required", []) if name != field]
                others = {name: _some(schema["properties"][name]) for name in required}
                return tool["function"]["name"], field, others
    raise ValueError("no tool runs commands")


def _some(schema: dict[str, Any]) -> Any:
    return {"boolean": False, "integer": 10, "number": 10, "array": [], "object": {}}.get(
        schema.get("type", ""), "next step"
    )


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages = request["messages"]
    task = " ".join(text_of(message) for message in messages if message["role"] == "user")
    done = sum(bool(message.get("tool_calls")) for message in messages)
    if done == len(COMMANDS):
        return {"content": "All done.", "reasoning_content": "That was the last step."}
    _asked[request["trial_id"], done] = first = _asked.get((request["trial_id"], done), 0) + 1
    if "REFUSED" in task and done == 3 and first == 1:
        return {"error": ("no_worker", "nobody is there just now")}
    name, field, others = shell(request["tools"])
    message: dict[str, Any] = {
        "content": "" if done == 5 else f"Step {done}: I run the next command.",
        "reasoning_content": f"Thinking about step {done}.",
        "tool_calls": [
            {"function": {"name": name, "arguments": json.dumps({**others, field: command}, indent=1)}}
            for command in COMMANDS[done]
        ],
    }
    if "CUT" in task and done == 3 and first == 1:
        message["fail_after_tokens"] = CUT_TOKENS
    return message
