"""What the scripted engine says: the commands of a task, one after the other. A line `RUN: COMMAND` of its text is a command."""

from __future__ import annotations

import json
from typing import Any

END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent takes for the end."""


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages = request["messages"]
    names = [tool["function"]["name"] for tool in request["tools"] or []]
    if not names:
        return {"content": "hello"}
    told = max(at for at, message in enumerate(messages) if message["role"] == "user" and "RUN: " in text_of(message))
    lines = text_of(messages[told]).splitlines()
    commands = [line.partition("RUN: ")[2].strip() for line in lines if "RUN: " in line]
    done = sum(message["role"] == "tool" for message in messages[told:])
    if "bash" in names:
        commands.append(END)
    elif done >= len(commands):
        return {"content": f"Done after {done} commands."}
    arguments = {"command": commands[min(done, len(commands) - 1)]}
    name = "bash" if "bash" in names else "Bash"
    call = {"id": "", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": f"Command {done + 1}.", "tool_calls": [call]}
