"""Sessions for people to look at: groups whose trials part, forks, thinking, failures, and as many more as one wants."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from steno.contracts.records import Group, Session, Timings, TokenSpan, Turn, WorkerSpan, floats_to_bytes, ids_to_bytes
from steno_proxy.store.interface import SessionStore
from tests.support.records.recordings import LAW, TOOLS, row

SYSTEM = {"role": "system", "content": "You are a careful engineer. Use the tools. Finish with the answer alone.\n" * 6}
FILES = ("parser.py", "lexer.py", "test_parser.py", "README.md", "setup.cfg")
THOUGHTS = (
    "The test fails because the lexer drops the last token.",
    "I should look at where the tokens are made before I change the parser.",
    "The failing case has a trailing comma; the grammar does not allow it.",
)
RUN = "fix-the-parser"


def made_turn(seed: int, number: int, parent: Turn | None, began: float, **fields: Any) -> Turn:
    """Turn `number` of a session of this seed: thinking, a few words, a call of a tool; the first is the same for all seeds."""
    draw = random.Random(number if number == 0 else seed * 1000 + number)
    turn_id = f"{random.Random(f'{seed}/{number}/{fields}').getrandbits(48):012x}"
    file = draw.choice(FILES)
    call = f"call_{turn_id}_0"
    said = [draw.randrange(1000, 150_000) for _ in range(draw.randint(30, 110))]
    read = [draw.randrange(1000, 150_000) for _ in range(draw.randint(60, 240))]
    result = f"$ sed -n 1,40p {file}\n" + "\n".join(
        f"{n:>3}  def rule_{n}(tokens): return tokens[{n}:]" for n in range(1, 24)
    )
    last_call = next(iter(parent.call_ids)) if parent and parent.call_ids else ""
    new: list[dict[str, Any]]
    if parent is None:
        new = [SYSTEM, {"role": "user", "content": "The parser fails on trailing commas. Find out why, and mend it."}]
    else:
        new = [{"role": "tool", "tool_call_id": last_call, "content": result}]
    reply = {
        "role": "assistant",
        "reasoning_content": draw.choice(THOUGHTS),
        "content": f"I look at `{file}` next." if number else "Let me see what there is.",
        "tool_calls": [
            {
                "id": call,
                "type": "function",
                "function": {"name": "bash", "arguments": f'{{"command": "sed -n 1,40p {file}\\npytest -x -q"}}'},
            }
        ],
    }
    half = len(said) // 2
    spans = [TokenSpan(version="base/3", start=0, end=half), TokenSpan(version="base/4", start=half, end=len(said))]
    queued = began + number * 4.2
    first = queued + 0.15 + draw.random() * 0.6
    values: dict[str, Any] = {
        "turn_id": turn_id,
        "parent_id": parent.turn_id if parent else None,
        "model": "qwen3-4b",
        "served_model": "Qwen/Qwen3-4B",
        "worker_id": f"node-{seed % 3}-gpu-0",
        "new_prompt_ids": ids_to_bytes(read),
        "prompt_tokens": len(read) + (parent.prompt_tokens + parent.completion_tokens if parent else 0),
        "prompt_digest": draw.randbytes(16),
        "completion_ids": ids_to_bytes(said),
        "sampling_logprobs": floats_to_bytes([-(draw.random() ** 4) * 5 for _ in said]),
        "versions": spans if number else [TokenSpan(version="base/3", start=0, end=len(said))],
        "finish_reason": "tool_calls",
        "delivered": len(said),
        "asked": {"temperature": 1.0, "max_tokens": 4096},
        "law": LAW,
        "messages": new,
        "reply": reply,
        "call_ids": {call: f"functions.bash:{number}"},
        "tools": TOOLS,
        "cached_tokens": 128 if number else 0,
        "task_step": "find" if number < 3 else "mend",
        "timings": Timings(
            queued=queued, started=queued + 0.1, first_token=first, last_token=first + 0.4 + draw.random() * 2
        ),
    }
    return Turn(**(values | fields))


async def record(store: SessionStore, session: Session, turns: Sequence[Turn]) -> None:
    """A session with these turns, in this order; a parent comes before its children."""
    await store.register(session)
    numbers: dict[str, int] = {}
    for turn in turns:
        numbers[turn.turn_id] = len(numbers)
        await store.commit(
            session.trial_id, turn, row(turn, parent=numbers.get(turn.parent_id or "", -1)), now=turn.timings.queued
        )


def straight(seed: int, count: int, began: float) -> list[Turn]:
    turns: list[Turn] = []
    for number in range(count):
        turns.append(made_turn(seed, number, turns[-1] if turns else None, began))
    return turns


async def group_of_four(store: SessionStore, group_id: str, seed: int, began: float, run_id: str = RUN) -> None:
    """Four trials: three that ended with 1, 0.25 and 0, and one that was given up; the first has forks and a lost worker."""
    trial_ids = [f"{group_id}.{n}" for n in range(4)]
    sessions = [
        Session(
            trial_id=trial_id,
            group_id=group_id,
            run_id=run_id,
            created_at=began,
            updated_at=began,
            metadata={"agent": "mini-swe-agent"},
        )
        for trial_id in trial_ids
    ]
    group = Group(
        group_id=group_id, run_id=run_id, size=4, trial_ids=trial_ids, created_at=began,
        task={"instruction": "The parser fails on trailing commas.", "repository": "parser"},
    )  # fmt: skip
    await store.create_group(group, sessions)
    better = 0.25 + min(0.5, seed / 100)
    for n, (session, reward) in enumerate(zip(sessions, (1.0, better, 0.0, None), strict=True)):
        turns = straight(seed + n, 5 + (seed + n) % 4, began)
        if n == 0:
            turns += extras(seed, turns, began)
        await record(store, session, turns)
        await store.complete(
            session.trial_id,
            status="aborted" if reward is None else "completed",
            reward=reward,
            end_reason="timeout" if reward is None else "completed",
            metrics={} if reward is None else {"tests_passed": 4 * reward},
            now=began + 60,
        )
        await store.settle(session.trial_id, now=began + 60)


def extras(seed: int, turns: list[Turn], began: float) -> list[Turn]:
    """A title, a rewritten history with its next turn, and a turn that two workers sampled and whose client left."""
    title = made_turn(
        seed, 9, None, began, fork_reason="new_conversation", finish_reason="stop", call_ids={},
        messages=[{"role": "user", "content": "A title for this conversation, please."}],
        reply={"role": "assistant", "content": "Trailing commas in the parser"}, tools=[],
    )  # fmt: skip
    rewritten = made_turn(seed, 10, turns[1], began, fork_reason="history_rewritten")
    after = made_turn(seed, 11, rewritten, began)
    tokens = after.completion_tokens
    lost = made_turn(
        seed, 12, after, began, attempt=1, partial=True, delivered=7, finish_reason="cancelled", constrained=[(4, 9)],
        workers=[WorkerSpan(worker_id="node-0-gpu-0", start=0, end=5), WorkerSpan(worker_id="node-1-gpu-0", start=5, end=tokens)],
    )  # fmt: skip
    return [title, rewritten, after, lost]


async def filled(store: SessionStore, groups: int = 6) -> None:
    """Groups of a run, the newest made a minute ago; and an open session without a group."""
    now = time.time()
    for number in range(groups):
        await group_of_four(store, f"parser-{number:02}", 10 * number, now - 60 - 600 * (groups - 1 - number))
    session = Session(trial_id="by-hand", created_at=now - 20, updated_at=now - 20, metadata={"agent": "claude-code"})
    await record(store, session, straight(7, 3, now - 20))


async def long_session(store: SessionStore, trial_id: str, turns: int = 300, tokens: int = 100_000) -> None:
    """So many turns in a row, with so many sampled tokens."""
    now = time.time() - 3600
    draw = random.Random(trial_id)
    each = tokens // turns
    found: list[Turn] = []
    for number in range(turns):
        ids = ids_to_bytes([draw.randrange(1000, 150_000) for _ in range(each)])
        found.append(made_turn(
            99, number, found[-1] if found else None, now, completion_ids=ids, delivered=each,
            sampling_logprobs=floats_to_bytes([-(draw.random() ** 4) * 5 for _ in range(each)]),
            versions=[TokenSpan(version="base/3", start=0, end=each)],
        ))  # fmt: skip
    await record(store, Session(trial_id=trial_id, created_at=now, updated_at=now), found)
    await store.complete(trial_id, status="completed", reward=1.0, end_reason="completed", metrics={}, now=now + 3000)
