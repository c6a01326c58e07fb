"""Sessions and turns as a proxy would record them, for tests of whatever stores or reads them."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from steno.contracts.records import IndexRow, Session, Timings, TokenSpan, Turn, floats_to_bytes, ids_to_bytes

SYSTEM = {"role": "system", "content": "You are a careful engineer. Use the tools. " * 8}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in the sandbox and return what it prints.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
LAW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [151645]}


def session(trial_id: str, *, created_at: float = 1_700_000_000.0, **fields: Any) -> Session:
    return Session(trial_id=trial_id, created_at=created_at, updated_at=created_at, **fields)


def turn(number: int, *, parent: Turn | None = None, seed: int = 0, text_bytes: int = 2_000, **fields: Any) -> Turn:
    """Turn `number` of an agent that calls one tool a turn; deterministic in (seed, number)."""
    draw = random.Random(seed * 1_000 + number)
    turn_id = f"{draw.getrandbits(48):012x}"
    completion_tokens = draw.randint(60, 180)
    prompt_ids = [draw.randrange(150_000) for _ in range(draw.randint(300, 700))]
    words = [
        f"{draw.choice(('src', 'lib', 'test'))}/{draw.getrandbits(28):x}.py:{draw.randrange(999)}" for _ in range(200)
    ]
    output = " ".join(words)[:text_bytes]
    began = 1_700_000_000.25 + number * 3.7
    last_call = next(iter(parent.call_ids)) if parent and parent.call_ids else ""
    new = (
        {"role": "tool", "tool_call_id": last_call, "content": output}
        if parent
        else {"role": "user", "content": output}
    )
    call = f"call_{turn_id}_0"
    arguments = f'{{"command": "sed -n {draw.randrange(99)},200p {words[0]}"}}'
    reply = {
        "role": "assistant",
        "content": f"Next I look at {words[1]}.",
        "tool_calls": [{"id": call, "type": "function", "function": {"name": "bash", "arguments": arguments}}],
    }
    values: dict[str, Any] = {
        "turn_id": turn_id,
        "parent_id": parent.turn_id if parent else None,
        "model": "gpt-4o-mini",
        "served_model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "worker_id": "node-7-gpu-0-3f2a",
        "new_prompt_ids": ids_to_bytes(prompt_ids),
        "prompt_tokens": len(prompt_ids) + (parent.prompt_tokens + parent.completion_tokens if parent else 0),
        "prompt_digest": draw.randbytes(16),
        "completion_ids": ids_to_bytes([draw.randrange(150_000) for _ in range(completion_tokens)]),
        "sampling_logprobs": floats_to_bytes([-draw.random() for _ in range(completion_tokens)]),
        "versions": [TokenSpan(version="base/17", start=0, end=completion_tokens)],
        "finish_reason": "tool_calls",
        "asked": {"temperature": 0.7, "max_tokens": 4096},
        "law": LAW | {"max_tokens": 4096 - number // 10},
        "messages": [new] if parent else [SYSTEM, new],
        "reply": reply,
        "call_ids": {call: f"functions.bash:{number}"},
        "tools": TOOLS,
        "options": {"tool_choice": "auto"},
        "cached_tokens": 128,
        "timings": Timings(queued=began, started=began + 0.0123, first_token=began + 0.0512, last_token=began + 2.81),
    }
    return Turn(**(values | fields))


def row(turn: Turn, *, parent: int = -1) -> IndexRow:
    """The index row of a turn whose parent has this number."""
    digests = b"".join(
        blake2b(repr(message).encode(), digest_size=16).digest() for message in [*turn.messages, turn.reply]
    )
    return IndexRow(
        turn_id=turn.turn_id,
        parent=parent,
        digests=digests,
        tools=blake2b(repr(turn.tools).encode(), digest_size=8).digest(),
        options=blake2b(repr(turn.options).encode(), digest_size=8).digest(),
        finish=turn.finish_reason,
        partial=turn.partial,
        path_tokens=turn.prompt_tokens + turn.completion_tokens,
        own_call_ids=list(turn.call_ids.values()),
        completion_tokens=turn.completion_tokens,
        tokenizer=bytes.fromhex(turn.tokenizer),
    )


def conversation(turns: int, *, seed: int = 0, text_bytes: int = 2_000) -> list[tuple[Turn, IndexRow]]:
    """A straight conversation: each turn continues the one before."""
    recorded: list[tuple[Turn, IndexRow]] = []
    for number in range(turns):
        parent = recorded[-1][0] if recorded else None
        made = turn(number, parent=parent, seed=seed, text_bytes=text_bytes)
        recorded.append((made, row(made, parent=number - 1)))
    return recorded
