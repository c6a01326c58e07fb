"""A small agent written with the official OpenAI SDK: `python -m steno_cli.demo.toy_agent --seed 7`. It has never heard of Steno.

Where it talks to is OPENAI_BASE_URL and OPENAI_API_KEY, as for any agent. Solves one world of `task.py` with one tool;
prints a line for each thing that happens. Exit code 0: the answer holds the code word; 1: it does not; 2: there was none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from steno_cli.demo.task import SYSTEM, TOOL, NotesWorld, call_tool, make_world

MAX_TURNS = 8


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="0", help="which world to solve")
    parser.add_argument("--model", default="tiny", help="model name to ask for")
    parser.add_argument("--no-stream", dest="stream", action="store_false", help="ask for whole answers")
    arguments = parser.parse_args()
    world = make_world(arguments.seed)
    try:
        answer = solve(openai.OpenAI(), arguments.model, world, stream=arguments.stream)
    except openai.OpenAIError as error:
        print(f"failed    {error}", flush=True)
        return 2
    print(f"{'solved' if world.solved_by(answer) else 'missed'}    {answer.strip()}", flush=True)
    return 0 if world.solved_by(answer) else 1


def solve(
    client: openai.OpenAI, model: str, world: NotesWorld, *, stream: bool, say: Callable[[str], None] = _say
) -> str:
    """Ask, call the tool, say what it returned, until the model answers without a call. Returns that answer."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": world.question()},
    ]
    say(f"asked     {world.question()}")
    for _ in range(MAX_TURNS):
        reply = (_ask_streamed if stream else _ask)(client, model, messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        for call in reply["tool_calls"]:
            function = call["function"]
            result = call_tool(world, function["name"], function["arguments"])
            say(f"called    {function['name']}({function['arguments']}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return f"(no answer after {MAX_TURNS} turns)"


def _ask(client: openai.OpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    request: Any = {"model": model, "messages": messages, "tools": [TOOL]}
    reply: ChatCompletion = client.chat.completions.create(**request)
    message = reply.choices[0].message
    said: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
    return said


def _ask_streamed(client: openai.OpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    """The same message, put together from its pieces."""
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    request: Any = {"model": model, "messages": messages, "tools": [TOOL], "stream": True}
    chunks: openai.Stream[ChatCompletionChunk] = client.chat.completions.create(**request)
    for chunk in chunks:
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        said["content"] += delta.content or ""
        for piece in delta.tool_calls or []:
            call = calls.setdefault(
                piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = piece.id or call["id"]
            if piece.function is not None:
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
    if calls:
        said["tool_calls"] = [calls[index] for index in sorted(calls)]
    return said


if __name__ == "__main__":
    sys.exit(main())
