"""An engine that counts: the ids of every completion are 0, 1, 2, …, so that a lost, doubled or moved token shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import EngineFailed
from steno.contracts.records import bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Generate, ModelCard, Started, StreamEvent
from steno_worker.interfaces import TokenTally

PROMPT = ids_to_bytes([7, 8, 9])
DIGEST = blake2b(PROMPT, digest_size=16).digest()


class CountingEngine:
    """Generates `job.sampling.max_tokens` ids, one per `pace_s`.

    Attributes:
        generated: per turn_id, how many ids were made so far.
        closed: turn_ids whose iterator has been closed or has ended.
        died: set to a reason, and every generation and `load` fail.
        before: called with each request first; may raise what the engine is to fail with.
    """

    def __init__(self, pace_s: float = 0.0, name: str = "counting") -> None:
        self.tally = TokenTally()
        self.pace_s = pace_s
        self.name = name
        self.generated: dict[str, int] = {}
        self.closed: list[str] = []
        self.died = ""
        self.before: Callable[[Generate], None] = lambda request: None

    def cards(self) -> list[ModelCard]:
        return [ModelCard(self.name, 100_000, policy_version="base/0")]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def load(self) -> tuple[int, int, float]:
        if self.died:
            raise EngineFailed(self.died)
        return len(self.generated) - len(self.closed), 0, 0.0

    async def count(self, job: Job) -> int:
        """A token for each character. Raises what `before` does."""
        self.before(Generate(0, "", 0, "", job))
        return sum(len(message["content"]) for message in job.messages)

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        self.generated[request.turn_id] = 0
        try:
            self.before(request)
            yield Started(request.stream, 0, PROMPT, 3, DIGEST, request.job.sampling)
            count = request.job.sampling.max_tokens or 0
            for index in range(count):
                await asyncio.sleep(self.pace_s)
                if self.died:
                    raise EngineFailed(self.died)
                self.generated[request.turn_id] += 1
                self.tally.sampled += 1
                yield Delta(
                    request.stream, ids_to_bytes([index]), floats_to_bytes([-0.5]), "base/0", content=f"{index} "
                )
            yield Finish(request.stream, "length", count)
        finally:
            self.closed.append(request.turn_id)


def job(tokens: int) -> Job:
    return Job(messages=[{"role": "user", "content": "count"}], sampling=Sampling(max_tokens=tokens))


def ids_of(events: list[StreamEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in bytes_to_ids(event.ids)]
