"""What the scripted engine says to agents of verifiers. With tools: a command that looks at its environment and reverses the
task's word, then the result. Without tools: the reversed word at once. `cedar` it does not reverse; `slow` takes a minute."""

from __future__ import annotations

import json
from typing import Any


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    messages = request["messages"]
    word = next(text_of(message) for message in messages if message["role"] == "user").split()[1]
    found = [text_of(message) for message in messages if message["role"] == "tool"]
    if request["tools"] and not found:
        command = f"env | grep -c ^STENO_; echo {word} | rev"
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        return {"content": "I look.", "reasoning_content": "A tool can do it.", "tool_calls": [{"function": call}]}
    said = found[-1].split()[-1] if found else word[::-1]
    return {"content": f"It is {word if word == 'cedar' else said}.", "delay_s": 60.0 if word == "slow" else 0.0}
