"""Workers as processes that are killed while they speak."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.programs.stack import ROOT, Stack

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("write", "look")
]
SCRIPT = """
from pathlib import Path

WORDS = " ".join(f"word{n}" for n in range(200))
FEW = " ".join(f"word{n}" for n in range(60))


def say(request):
    told = Path(__file__).with_name(request["trial_id"] + ".told")
    # What is to be cut is told slowly, what comes after it is not.
    asked = request["messages"][-1]["content"]
    slow = 0.2 if asked == "few" else 0.05
    pace_s = 0.0 if told.exists() or "whole" in told.name else slow
    told.touch()
    return {"pace_s": pace_s} | reply(asked)


def reply(asked):
    if asked == "reason":
        return {"content": "So be it.", "reasoning_content": WORDS}
    if asked == "call":
        return {"content": "Look.", "tool_calls": [
            {"function": {"name": "look", "arguments": {"at": "here"}}},
            {"function": {"name": "write", "arguments": {"text": WORDS, "deep": {"er": [1, 2, "}{"]}}}}]}
    return {"content": {"stop": WORDS + " HALT here, and never this", "few": FEW}.get(asked, WORDS)}
"""


def scripted(folder: Path, name: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    model = str(ROOT / "steno/models/tiny")
    return [
        "--engine", "scripted", "--script", f"{script}:say", "--model", model, "--worker-id", name,
        "--drain-s", "0.1",
    ]  # fmt: skip


class Answer:
    """A chat answer as it streams."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.finish: str | None = None
        self.done = False
        self.broken = False  # its connection, in the middle

    def take(self, line: str) -> bool:
        """Take one line of the stream. Returns: whether it is a chunk, and the answer has any text or call so far."""
        if line == "data: [DONE]":
            self.done = True
        if not line.startswith("data: {"):
            return False
        chunk = json.loads(line[6:])
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                call = self.calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                assert not (call["id"] and piece.get("id")), "a call is told once"
                call["id"] += piece.get("id") or ""
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
            self.finish = choice["finish_reason"] or self.finish
        return bool(self.content or self.reasoning or self.calls)


def ask(
    stack: Stack, trial: str, text: str, interrupt: Callable[[Answer], bool] = lambda answer: False, **fields: Any
) -> Answer:
    """Stream an answer. interrupt: called for each event once there is text or a call, until it returns True; then the worker
    that samples is killed."""
    answer, killed = Answer(), False
    body = {"messages": [{"role": "user", "content": text}], "stream": True} | fields
    try:
        with httpx.stream("POST", stack.base_url(trial) + "/chat/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if answer.take(line) and not killed and interrupt(answer):
                    killed = True
                    kill_speaker(stack)
    except httpx.RemoteProtocolError:
        answer.broken = True
    return answer


def speakers(stack: Stack) -> list[str]:
    return [one["id"] for one in stack.get("/workers")["items"] if one["in_flight"]]


def kill_speaker(stack: Stack) -> str:
    """SIGKILL to the one worker that has a stream. Its process has its name in the command line. Returns: its name."""
    until = time.monotonic() + 30
    while not (speaking := speakers(stack)):
        assert time.monotonic() < until, stack.logs()
        time.sleep(0.01)
    [name] = speaking
    child = next(one for one in stack.workers if name in one.args)  # type: ignore[operator]
    child.kill()
    child.wait()
    stack.workers.remove(child)
    return name


def wait_for(stack: Stack, *names: str) -> None:
    """Until exactly these workers take turns."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        able = {one["id"] for one in stack.get("/workers")["items"] if one["connected"] and not one["draining"]}
        if able == set(names):
            return
        time.sleep(0.05)
    raise AssertionError(f"{names} did not come to be the fleet\n{stack.logs()}")


def names(prefix: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{prefix}{number}"
        number += 1
