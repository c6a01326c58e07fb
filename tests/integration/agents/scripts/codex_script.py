"""What the scripted engine says to Codex: a task of a dozen turns with single and parallel calls, reasoning, two
sub-agents at the same time, an engine that refuses before its first token and one that fails in the middle of an
answer. Which of that happens is in the task's words, so that one script serves every test.
"""

from __future__ import annotations

import json
import re
from typing import Any

Call = tuple[str, dict[str, Any]]
FIXED = "def add(a, b):\n    return a + b\n"
SUMMARY = "Summary: src/calc.py was fixed, and two steps are left."
REPORT = "SUBTASK {}: look around and report."
_AGENT = re.compile(r'"agent_id":\s*"([^"]+)"')
SLOW_THOUGHT = "Thinking about step 3."
"""What is thought in the turn that a task with SLOW in it holds up, once."""
_asked: dict[tuple[str, int], int] = {}


def shell(command: str, **more: Any) -> Call:
    return "exec_command", {"cmd": command, **more}


STEPS: list[list[Call]] = [
    [shell("pwd")],
    [shell("mkdir -p src && ls -la")],
    [shell("printf 'def add(a, b):\\n    return a - b\\n' > src/calc.py")],
    [shell("cat src/calc.py"), shell("wc -c src/calc.py")],
    [shell("sed -i 's/a - b/a + b/' src/calc.py")],
    [shell("cat no-such-file")],
    [shell("""echo 'naïve café ☕ 漢字 "quoted" \\\\ backslash'""")],
    [("no_such_tool", {"a": 1})],
    [shell("nl -ba src/calc.py"), shell("true", yield_time_ms=5000.0), shell("echo three at once")],
    [shell("git status --short || true", login=False)],
    [shell("echo done")],
]
DELEGATED: list[list[Call]] = [
    [("multi_agent_v1__spawn_agent", {"message": REPORT.format(i)}) for i in (1, 2)],
    [("multi_agent_v1__wait_agent", {"targets": ["{agent 0}", "{agent 1}"], "timeout_ms": 60000})],
]
SUBTASK: list[list[Call]] = [[shell("ls")], [shell("echo sub-agent")]]


def in_one_script(calls: list[Call]) -> Call:
    """The same for a Codex that knows the model: it offers one tool, to which the model writes JavaScript."""
    lines = [
        f"text(JSON.stringify(await tools.{name}({json.dumps(given, ensure_ascii=False)})));"
        for name, given in calls
        if name == "exec_command"
    ]
    return "exec", {"input": "\n".join(lines) or 'text("\\u2028");'}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages, turn = request["messages"], request["turn"]
    said = " ".join(text_of(message) for message in messages if message["role"] == "user")
    if not request["tools"] or "CONTEXT CHECKPOINT COMPACTION" in said:
        return {"content": SUMMARY}
    steps = STEPS[:4] + (DELEGATED if "DELEGATE" in said else []) + STEPS[4:]
    if SUMMARY in said:
        steps = STEPS[-2:]
    if "SUBTASK" in said:
        steps = SUBTASK
    if turn >= len(steps):
        return {"content": "All done.", "reasoning_content": "That was the last step."}
    key = (request["trial_id"], turn)
    _asked[key] = _asked.get(key, 0) + 1
    if "REFUSED" in said and turn == 3 and _asked[key] == 1:
        return {"error": ("no_worker", "nobody is there just now")}
    offered = {tool["function"]["name"] for tool in request["tools"]}
    calls = steps[turn] if "exec_command" in offered else [in_one_script(steps[turn])]
    agents = [agent for message in messages if message["role"] == "tool" for agent in _AGENT.findall(text_of(message))]
    message: dict[str, Any] = {
        "content": f"Step {turn}: I run the next command.",
        "reasoning_content": f"Thinking about step {turn}.",
        "tool_calls": [
            {"function": {"name": name, "arguments": _filled(json.dumps(given), agents)}} for name, given in calls
        ],
    }
    if "CUT" in said and turn == 3 and _asked[key] == 1:
        message["fail_after_tokens"] = 60
    if "SLOW" in said and turn == 3 and _asked[key] == 1:
        message["pace_s"] = 1.5
    return message


def _filled(arguments: str, agents: list[str]) -> str:
    for i, agent in enumerate(agents):
        arguments = arguments.replace(f"{{agent {i}}}", agent)
    return arguments
