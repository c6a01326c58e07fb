"""What the upstream says in these tests: the scripted engine of a Steno of its own, behind the one that is tested."""

from __future__ import annotations

import json
from typing import Any


def say(request: dict[str, Any]) -> Any:
    if not request["messages"]:
        return f"{request['prompt']} upon a time"
    last = request["messages"][-1]
    if last["role"] == "tool":
        results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
        return f"seen: {', '.join(results)}"
    asked = last["content"]
    if asked == "look":
        calls = [{"function": {"name": "look", "arguments": {"at": at}}} for at in ("this", "that")]
        return {"content": "let me look", "tool_calls": calls}
    if asked == "what did you get":
        return json.dumps(
            {key: request[key] for key in ("temperature", "seed", "max_tokens", "response_format", "tool_choice")}
        )
    return {
        "think": {"reasoning_content": "hmm", "content": "thought"},
        "slowly": {"content": "a long story that is told slowly, word by word", "pace_s": 0.02},
        "for ever": {"content": "and so on " * 500, "pace_s": 0.2},
        "break off": {"content": "one two three four five six", "fail_after_tokens": 12},
        "429": {"error": ("rate_limited", "come back later")},
        "503": {"error": ("engine_failed", "out of order")},
        "401": {"error": ("invalid_api_key", "who is sk-test-of-the-upstream?")},
        "too long": {"error": ("context_length_exceeded", "the prompt has 5000 tokens; the model's context is 4000")},
    }.get(asked, f"you said {asked}")
