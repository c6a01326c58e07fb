"""What the tiny model is trained on: conversations in which a note leads to a note, as text with the trained parts marked.

Owns the distribution: variants of thinking and of answers with fixed odds (so that sampling at temperature 1 has something
to choose, and a trainer something to change), prompts with and without tools, histories with thinking kept and dropped.
The words of each example are drawn anew, so that copying them is the only way to get them right.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from steno_cli.demo.task import MAX_HOPS, SYSTEM, TOOL, NotesWorld, call_tool, make_world, path_of

Message = dict[str, Any]

FIRST = ["The question names the first note.", "I begin with the first note.", "I will read the note."]
NEXT = ["This note names another one.", "I go on to the next note.", "Not there yet."]
LAST = ["That is the code word.", "The note has it.", "Now I know."]
ANSWERS = ["The code word is {}.", "I found it: {}."]
CHATS = [
    ("Hello.", "Hello! Give me a note to start with."),
    ("Say hello.", "Hello! Give me a note to start with."),
    ("Who are you?", "I am a tiny model that reads notes."),
    ("What can you do?", "I can follow notes to a code word."),
]
ODDS = [0.6, 0.25, 0.15]
"""Of the first, second and third variant of a thought. Two variants of an answer: 0.8 and 0.2."""


def solve(world: NotesWorld, rng: random.Random, thinking: bool) -> list[Message]:
    """The whole conversation of a run that goes right, system prompt included."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": world.question()}]
    path, thoughts = world.start, FIRST
    while True:
        arguments = json.dumps({"path": path})
        call = {
            "id": f"c{len(messages)}",
            "type": "function",
            "function": {"name": "read_note", "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call], **_thought(rng, thoughts, thinking)})
        note = call_tool(world, "read_note", arguments)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": note})
        if world.code_word in note:
            answer = rng.choices(ANSWERS, [0.8, 0.2])[0].format(world.code_word)
            return [*messages, {"role": "assistant", "content": answer, **_thought(rng, LAST, thinking)}]
        path, thoughts = note.removeprefix("Go on to ").removesuffix("."), NEXT


def _thought(rng: random.Random, variants: list[str], thinking: bool) -> Message:
    return {"reasoning_content": rng.choices(variants, ODDS)[0]} if thinking else {}


def tools_as_sent(rng: random.Random) -> list[dict[str, Any]]:
    """The tool as clients and servers pass it on: keys in other orders, fields added. Usually as the demo sends it."""
    tool = copy.deepcopy(TOOL)
    if rng.random() < 0.6:
        return [tool]
    if rng.random() < 0.3:
        tool["function"]["strict"] = None
    if rng.random() < 0.5:
        tool["function"] = dict(sorted(tool["function"].items()))
        tool["function"]["parameters"] = dict(sorted(tool["function"]["parameters"].items()))
    return [dict(sorted(tool.items())) if rng.random() < 0.3 else tool]


def example(template: Any, rng: random.Random, brief: bool = False) -> list[tuple[str, bool]]:
    """One conversation as [(text, trained)]. `template(messages, tools, **options) -> str`, as chat templates are called.

    brief: leave out the system prompt and the tools. Copying is learnt from these first, at a third of the cost.
    """
    draw = rng.random()
    if draw < 0.03:
        asked, said = rng.choice(CHATS)
        prompt = template([{"role": "user", "content": asked}], None, enable_thinking=rng.random() < 0.5)
        return [(prompt, False), (said + "<|im_end|>", True)]
    thinking = draw < 0.85
    messages = solve(make_world(rng.getrandbits(60), rng.randint(2, MAX_HOPS)), rng, thinking)
    if brief or rng.random() < 0.1:
        messages = messages[1:]
    tools = None if brief else tools_as_sent(rng)
    if rng.random() < 0.15:  # a history whose thinking is gone, and only what is said next trained
        last = rng.choice([index for index, message in enumerate(messages) if message["role"] == "assistant"])
        history = [{key: message[key] for key in message if key != "reasoning_content"} for message in messages[:last]]
        prompt = template(history, tools, enable_thinking=thinking)
        whole = template([*history, messages[last]], tools, add_generation_prompt=False)
        return [(prompt, False), (_completion(prompt, whole), True)]
    pieces: list[tuple[str, bool]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template(messages[:index], tools, enable_thinking=thinking)
        if pieces:  # as a recorder continues: what was sampled stays, the rest is what the template adds to it
            opened = template(messages[:index], tools, add_generation_prompt=False)
            since = template(messages[: index - 1], tools, add_generation_prompt=False)
            pieces.append((opened[len(since) - 1 :] + prompt[len(opened) :], False))
        else:
            pieces.append((prompt, False))
        pieces.append((_completion(prompt, template(messages[: index + 1], tools, add_generation_prompt=False)), True))
    return pieces


def _completion(prompt: str, whole: str) -> str:
    """What the model must say after `prompt` for the conversation to read `whole`, its end token included."""
    header = prompt.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
    return whole[header:].removesuffix("\n")


def tokenizer_corpus(rng: random.Random, template: Any) -> list[str]:
    """Text that the BPE is trained on: the conversations, and each name in every place it can stand in."""
    from steno_cli.demo.task import WORDS

    names = [f"{word} {word} /{path_of(word)} The code word is {word}." for word in WORDS for _ in range(40)]
    talks = ["".join(text for text, _ in example(template, rng)) for _ in range(300)]
    english = [
        "You are a helpful assistant that can use a shell. The user asks for a task; answer with a command and its output.",
        '{"name": "bash", "arguments": {"command": "ls -la"}} {"type": "object", "properties": {}, "required": []}',
        "import os\nfor line in open(path):\n    print(line.strip())\nif not found:\n    return None\n",
    ]
    return names + talks + english * 20
