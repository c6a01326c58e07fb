"""A recorded session and the clients that talk to it, for tests: each `ask` recognises, each `commit` records.

`Talk.messages` is the history as one client has it. Tokens are arbitrary ids: nothing here tokenises.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from steno.contracts.chat import Message
from steno.contracts.records import IndexRow, Session, Timings, TokenSpan, Turn, floats_to_bytes, ids_to_bytes
from steno_proxy.sessions.messages.call_ids import client_call_id, echoed_ids
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.sessions.tree import Recognition, Tree

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str = "", *calls: tuple[str, str, str]) -> Message:
    """calls: (id, name, arguments)."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def tool(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@dataclass
class Asked:
    """A request in flight: what was recognised, and what its commit needs."""

    messages: list[Message]
    tools: bytes
    options: bytes
    found: Recognition


@dataclass
class Recorded:
    tree: Tree = field(default_factory=Tree)
    rows: list[IndexRow] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def look(self, messages, tools=TOOLS, options=None) -> Recognition:
        return self.tree.recognise(
            [message_digest(m) for m in messages],
            tools_digest(tools),
            options_digest(options),
            [echoed_ids(m) for m in messages],
        )

    def ask(self, messages, tools=TOOLS, options=None) -> Asked:
        found = self.look(messages, tools, options)
        return Asked(list(messages), tools_digest(tools), options_digest(options), found)

    def commit(self, asked: Asked, text="", calls=(), *, partial=False, tokens=None, own=None) -> Message:
        """Record a reply with `calls` [(name, arguments)]; returns it as the client sees it."""
        turn_id = f"{self.rng.getrandbits(48):012x}"
        ids = [client_call_id("call", turn_id, i) for i in range(len(calls))]
        reply = assistant(text, *[(ids[i], name, arguments) for i, (name, arguments) in enumerate(calls)])
        tokens = self.rng.randrange(1, 9) if tokens is None else tokens
        parent = self.turns[asked.found.parent] if asked.found.parent >= 0 else None
        new_prompt = [self.rng.randrange(2**31) for _ in range(self.rng.randrange(1, 9))]
        prompt_tokens = len(new_prompt) + (parent.prompt_tokens + parent.completion_tokens if parent else 0)
        messages = asked.messages[asked.found.prefix_messages :]
        self.turns.append(
            Turn(
                turn_id=turn_id,
                parent_id=parent.turn_id if parent else None,
                fork_reason=asked.found.fork_reason,
                index=len(self.turns),
                new_prompt_ids=ids_to_bytes(new_prompt),
                prompt_tokens=prompt_tokens,
                completion_ids=ids_to_bytes([self.rng.randrange(2**31) for _ in range(tokens)]),
                sampling_logprobs=floats_to_bytes([-self.rng.random() for _ in range(tokens)]),
                versions=[TokenSpan(version="run/1", start=0, end=tokens)] if tokens else [],
                partial=partial,
                messages=messages,
                reply=reply,
                timings=Timings(queued=0.0),
            )
        )
        row = IndexRow(
            turn_id=turn_id,
            parent=asked.found.parent,
            digests=b"".join(message_digest(m) for m in [*messages, reply]),
            tools=asked.tools,
            options=asked.options,
            finish="cancelled" if partial else "tool_calls" if calls else "stop",
            partial=partial,
            path_tokens=prompt_tokens + tokens,
            own_call_ids=own if own is not None else [f"own{i}" for i in range(len(calls))],
            completion_tokens=tokens,
        )
        self.rows.append(row)
        self.tree.add(row)
        return reply

    def say(self, messages, text="", calls=(), **how) -> list[Message]:
        """Ask and commit at once; returns the history with the reply."""
        return [*messages, self.commit(self.ask(messages), text, calls, **how)]


def session(**fields) -> Session:
    return Session(trial_id="trial", created_at=0.0, updated_at=0.0, **fields)
