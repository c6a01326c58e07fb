"""What the scripted engine says to OpenCode: a task of a dozen turns with single and parallel calls of most of its tools. More is
asked for by words in the task: sub-agents, an engine that refuses a turn, one that fails in the middle of an answer, calls that
can't be made, and output until the conversation is compacted.
"""

from __future__ import annotations

import json
from typing import Any

CALC = "def add(a, b):\n    return a - b\n"
ODD = """echo 'naïve café ☕ 漢字 "quoted" \\\\ backslash'"""
Calls = list[tuple[str, dict[str, Any]]]


def bash(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command, "description": "next step", **more}


def explorer(number: int) -> tuple[str, dict[str, Any]]:
    prompt = f"SUBTASK {number}: look around and report."
    return "task", {"description": f"subtask {number}", "prompt": prompt, "subagent_type": "general"}


def steps(task: str) -> list[Calls]:
    """The calls of each turn of the main conversation; `{cwd}` is where it works."""
    todo = {"content": "fix it", "status": "in_progress", "priority": "high", "id": "1"}
    found: list[Calls] = [
        [bash("pwd")],
        [("write", {"filePath": "{cwd}/src/calc.py", "content": CALC})],
        [("read", {"filePath": "{cwd}/src/calc.py"})],
        [bash("ls -la src"), bash("wc -c src/calc.py")],
        [("edit", {"filePath": "{cwd}/src/calc.py", "oldString": "a - b", "newString": "a + b"})],
        [bash("cat src/calc.py", timeout=5000.0)],
        [bash(ODD)],
        [bash("cat no-such-file")],
        [("grep", {"pattern": "a . b", "path": "{cwd}/src"}), ("glob", {"pattern": "**/*.py"})],
        [("todowrite", {"todos": [todo]})],
        [bash("echo done")],
    ]
    if "DELEGATE" in task:
        found.insert(5, [explorer(1), explorer(2)])
    if "LONG" in task:
        found[6:6] = [[bash("seq 1 3000")], [bash("seq 1 3000")]]
    if "BROKEN" in task:
        found[6:6] = [[("no_such_tool", {"a": 1})]]
    return found


SUMMARY = "What was to be done is done."
SUBTASK: list[Calls] = [[bash("ls")], [bash("echo sub-agent")]]
_asked: dict[tuple[str, int], int] = {}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages = request["messages"]
    # What a cut answer left in its history has no text: it is no step that was taken.
    turn = sum(message["role"] == "assistant" and bool(text_of(message)) for message in messages)
    system = text_of(messages[0])
    if "title generator" in system:
        return {"content": "A title"}
    if "summarization" in system:
        return {"content": SUMMARY}
    if any(text_of(message) == SUMMARY for message in messages):
        return {"content": "All done."}
    task = next(text_of(message) for message in messages if message["role"] == "user")
    planned = SUBTASK if "SUBTASK" in task else steps(task)
    if turn >= len(planned):
        return {"content": "Nothing unusual." if planned is SUBTASK else "All done."}
    key = (request["trial_id"], turn)
    _asked[key] = _asked.get(key, 0) + 1
    first = _asked[key] == 1
    if "REFUSED" in task and turn == 3 and first:
        return {"error": ("no_worker", "nobody is there just now")}
    cwd = next((text_of(message).strip() for message in messages if message["role"] == "tool"), "")
    message: dict[str, Any] = {
        "content": f"Step {turn}: I run the next command.",
        "reasoning_content": f"Thinking about step {turn}.",
        "tool_calls": [{"function": {"name": name, "arguments": _spelt(given, cwd)}} for name, given in planned[turn]],
    }
    if "CUT" in task and turn == 3 and first:
        message |= {"fail_after_tokens": 60, "pace_s": 0.3}
    return message


def _spelt(arguments: dict[str, Any], cwd: str) -> str:
    """With spaces and escapes that no client writes back."""
    filled = {key: value.replace("{cwd}", cwd) if isinstance(value, str) else value for key, value in arguments.items()}
    return json.dumps(filled, indent=1)
