"""A completion cut in two: the first part by one call of an engine, the rest by another, as two workers would (I9)."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from steno.contracts.chat import Job
from steno.contracts.records import bytes_to_floats, bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Generate, Shown, Started


@dataclass
class Part:
    """What came of one call."""

    started: Started
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # index -> [name, arguments]
    finish: Finish | None = None

    def shown(self) -> Shown:
        return Shown(len(self.reasoning), len(self.content), [len(self.calls[i][1]) for i in sorted(self.calls)])

    def said(self, *later: Part) -> tuple[str, str, list[list[str]]]:
        """This part and what came after it: reasoning, content, calls."""
        calls = {index: list(call) for index, call in self.calls.items()}
        for part in later:
            for index, (name, arguments) in part.calls.items():
                known = calls.setdefault(index, ["", ""])
                assert not (known[0] and name), "a call is told once"
                known[0], known[1] = known[0] or name, known[1] + arguments
        parts = (self, *later)
        return "".join(p.reasoning for p in parts), "".join(p.content for p in parts), [calls[i] for i in sorted(calls)]


async def generate(engine: Any, request: Generate, *, until: int | None = None) -> Part:
    """Run a request; until: closed after so many tokens, as by a kill."""
    part: Part | None = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Started):
                part = Part(event)
            elif isinstance(event, Delta):
                assert part is not None
                part.ids += bytes_to_ids(event.ids)
                part.logprobs += bytes_to_floats(event.logprobs)
                part.content += event.content
                part.reasoning += event.reasoning
                for piece in event.tool_calls:
                    call = part.calls.setdefault(piece.index, ["", ""])
                    call[0], call[1] = call[0] or piece.name, call[1] + piece.arguments
                if until is not None and len(part.ids) >= until:
                    break
            else:
                assert part is not None
                part.finish = event
    assert part is not None
    return part


def rest_of(job: Job, *parts: Part, turn_id: str) -> Generate:
    """What a second worker is asked for after these parts."""
    first = parts[0]
    reasoning, content, calls = first.said(*parts[1:])
    return Generate(
        2,
        turn_id,
        len(parts),
        "t",
        msgspec.structs.replace(job, sampling=first.started.law),
        prefix_ids=first.started.new_ids,
        sampled_ids=ids_to_bytes([token for part in parts for token in part.ids]),
        shown=Shown(len(reasoning), len(content), [len(arguments) for _, arguments in calls]),
    )
