"""What the scripted engine says to Claude Code: a task of a dozen turns with single and parallel calls, two sub-agents at the
same time, an engine that fails before its first token and one that fails in the middle of an answer. Which of that happens is
in the task's words, so that one script serves every test.
"""

from __future__ import annotations

import json
from typing import Any

CALC = "def add(a, b):\n    return a - b\n"
ODD = """echo 'naïve café ☕ 漢字 "quoted" \\\\ backslash'"""


def bash(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "next step", **more}


def explorer(number: int) -> tuple[str, dict[str, Any]]:
    prompt = f"SUBTASK {number}: look around and report."
    named = {"description": f"subtask {number}", "subagent_type": "general-purpose", "run_in_background": False}
    return "Agent", {"prompt": prompt, **named}


def steps(task: str) -> list[list[tuple[str, dict[str, Any]]]]:
    """The calls of each turn of the main conversation."""
    found = [
        [bash("pwd")],
        [("Write", {"file_path": "{cwd}/src/calc.py", "content": CALC})],
        [("Read", {"file_path": "{cwd}/src/calc.py"})],
        [bash("ls -la src"), bash("wc -c src/calc.py")],
        [
            (
                "Edit",
                {"file_path": "{cwd}/src/calc.py", "old_string": "a - b", "new_string": "a + b", "replace_all": False},
            )
        ],
        [bash("cat src/calc.py", timeout=5000.0)],
        [bash(ODD)],
        [bash("cat no-such-file")],
        [bash("python3 -c 'print(2 + 3)'"), ("Read", {"file_path": "{cwd}/src/calc.py"})],
        [bash("true")],
        [bash("echo done")],
    ]
    if "DELEGATE" in task:
        found.insert(5, [explorer(1), explorer(2)])
    if "SEARCH" in task:
        found.insert(3, [("ToolSearch", {"query": "select:NotebookEdit", "max_results": 5})])
    return found


SUMMARY = "The user asked for a fix of src/calc.py, which was made."
SUBTASK = [[bash("ls")], [bash("echo sub-agent")]]
SLOW_THOUGHT = "Thinking about step 3."
"""What is thought in the turn that a task with SLOW in it holds up, once."""
_asked: dict[tuple[str, int], int] = {}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    if not request["tools"]:
        return {"content": "A title"}
    messages, turn = request["messages"], request["turn"]
    if messages[-1]["role"] == "user" and "Respond with TEXT ONLY" in text_of(messages[-1]):
        return {"content": f"<analysis>\nThe bug is fixed.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>"}
    if any(message["role"] == "user" and SUMMARY in text_of(message) for message in messages):
        return {"content": "Still done."}
    task = next(text_of(message) for message in messages if message["role"] == "user")
    planned = SUBTASK if "SUBTASK" in task else steps(task)
    if turn >= len(planned):
        return {"content": "All done." if planned is not SUBTASK else "Nothing unusual."}
    key = (request["trial_id"], turn)
    _asked[key] = _asked.get(key, 0) + 1
    again = _asked[key] > 1
    if "REFUSED" in task and turn == 3 and not again:
        return {"error": ("no_worker", "nobody is there just now")}
    cwd = next((text_of(m).strip() for m in messages if m["role"] == "tool"), "")
    message: dict[str, Any] = {
        "content": f"Step {turn}: I run the next command.",
        "reasoning_content": f"Thinking about step {turn}.",
        "tool_calls": [
            {"function": {"name": name, "arguments": json.dumps(_filled(given, cwd))}} for name, given in planned[turn]
        ],
    }
    if "CUT" in task and turn == 3 and not again:
        message["fail_after_tokens"] = 60 if "LATE" in task else 5
    if "SLOW" in task and turn == 3 and not again:
        message["pace_s"] = 1.5
    if "LENGTH" in task and turn == 3 and not again:
        message["length_after_tokens"] = 60 if "CALL" in task else 25
    return message


def _filled(arguments: dict[str, Any], cwd: str) -> dict[str, Any]:
    return {key: value.replace("{cwd}", cwd) if isinstance(value, str) else value for key, value in arguments.items()}
