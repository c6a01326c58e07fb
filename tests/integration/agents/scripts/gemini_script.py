"""What the scripted engine says to Gemini CLI: a task of a dozen turns with single and parallel calls. By words in the task, the
engine refuses one turn, or fails in the middle of its answer.
"""

from __future__ import annotations

import json
import re
from typing import Any

CALC = "def add(a, b):\n    return a - b\n"
ODD = """echo 'naïve café ☕ 漢字 "quoted" \\\\ backslash'"""
Calls = list[tuple[str, dict[str, Any]]]


def shell(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "run_shell_command", {"command": command, "description": "next step", **more}


FILE = "{cwd}/src/calc.py"
STEPS: list[Calls] = [
    [shell("pwd")],
    [("write_file", {"file_path": FILE, "content": CALC})],
    [("read_file", {"file_path": FILE, "start_line": 1})],
    [shell("ls -la src"), shell("wc -c src/calc.py")],
    [
        (
            "replace",
            {"file_path": FILE, "instruction": "add, not subtract", "old_string": "a - b", "new_string": "a + b"},
        )
    ],
    [shell("cat src/calc.py", is_background=False)],
    [shell(ODD)],
    [shell("cat no-such-file")],
    [("grep_search", {"pattern": "a . b", "total_max_matches": 10.0}), ("glob", {"pattern": "**/*.py"})],
    [("list_directory", {"dir_path": "{cwd}/src"})],
    [shell("echo done")],
]
_asked: dict[tuple[str, int], int] = {}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages, turn = request["messages"], request["turn"]
    if turn >= len(STEPS):
        return {"content": "All done."}
    task = "".join(text_of(message) for message in messages if message["role"] == "user")
    key = (request["trial_id"], turn)
    _asked[key] = _asked.get(key, 0) + 1
    first = _asked[key] == 1
    if "REFUSED" in task and turn == 3 and first:
        return {"error": ("no_worker", "nobody is there just now")}
    told = next((text_of(message) for message in messages if message["role"] == "tool"), "")
    cwd = found[1] if (found := re.search(r"Output: (\S+)", told)) else ""
    message: dict[str, Any] = {
        "content": f"Step {turn}: I run the next command.",
        "reasoning_content": f"Thinking about step {turn}.",
        "tool_calls": [{"function": {"name": name, "arguments": _spelt(given, cwd)}} for name, given in STEPS[turn]],
    }
    if "CUT" in task and turn == 3 and first:
        message["fail_after_tokens"] = 60
    return message


def _spelt(arguments: dict[str, Any], cwd: str) -> str:
    filled = {key: value.replace("{cwd}", cwd) if isinstance(value, str) else value for key, value in arguments.items()}
    return json.dumps(filled, indent=1)
