"""A real worker client over an engine that costs next to nothing: what is measured is the proxy, not a model.

Every token is ` tok`; one shared ticker paces all streams; prompts "render" to one id per four bytes of new text. A last message
of "wait silently" is started and never answered.

    python -m benchmarks.worker --proxy ws://127.0.0.1:8080 --pace-s 0.02
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from array import array
from collections.abc import AsyncIterator
from hashlib import blake2b

import uvloop

from steno.contracts.chat import Job
from steno.contracts.errors import ContextOverflow
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Generate, ModelCard, Started, StreamEvent
from steno_worker import main as worker
from steno_worker.config import WorkerSettings
from steno_worker.interfaces import TokenTally

CONTEXT_TOKENS = 1 << 20
_ID = ids_to_bytes([17])
_LOGPROB = floats_to_bytes([-0.5])


class PacedEngine:
    """An `Engine` (inference_worker/steno_worker/interfaces.py) whose tokens fall due together, as a batch's do."""

    def __init__(self, pace_s: float) -> None:
        self.tally = TokenTally()
        self.pace_s = pace_s
        self.running = 0
        self._tick: asyncio.Future[None] | None = None
        self._ticker: asyncio.Task[None] | None = None

    def cards(self) -> list[ModelCard]:
        return [ModelCard("bench", CONTEXT_TOKENS, capabilities=["tools", "logprobs"])]

    async def start(self) -> None:
        self._tick = asyncio.get_running_loop().create_future()
        self._ticker = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._ticker:
            self._ticker.cancel()

    def load(self) -> tuple[int, int, float]:
        return self.running, 0, 0.0

    async def count(self, job: Job) -> int:
        return sum(len(message["content"]) for message in job.messages) // 4

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self.pace_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            tick, self._tick = self._tick, loop.create_future()
            assert tick is not None
            tick.set_result(None)

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        job = request.job
        new = job.messages[request.prefix_messages :]
        size = max(1, sum(len(str(message["content"])) for message in new) // 4)
        prefix = len(request.prefix_ids) // 4
        if prefix + size >= CONTEXT_TOKENS:
            raise ContextOverflow(
                f"the prompt has {prefix + size} tokens; the model's context is {CONTEXT_TOKENS}",
                field="messages", prompt_tokens=prefix + size, context_tokens=CONTEXT_TOKENS,
            )  # fmt: skip
        new_ids = ids_to_bytes(array("i", range(size)))
        digest = blake2b(request.prefix_ids + new_ids, digest_size=16).digest()
        yield Started(request.stream, prefix, new_ids, prefix + size, digest, job.sampling)
        count = job.sampling.max_tokens or 8
        self.running += 1
        try:
            if str(new[-1]["content"]).startswith("wait silently") if new else False:
                await asyncio.get_running_loop().create_future()
            if count <= 8:  # short answers come at once: these cases measure requests, not pace
                yield Delta(request.stream, _ID * count, _LOGPROB * count, "base/0", " tok" * count)
            else:
                for _ in range(count):
                    assert self._tick is not None
                    await asyncio.shield(self._tick)
                    yield Delta(request.stream, _ID, _LOGPROB, "base/0", " tok")
            yield Finish(request.stream, "stop", count)
        finally:
            self.running -= 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy", required=True)
    parser.add_argument("--pace-s", type=float, default=0.02)
    args = parser.parse_args()
    settings = WorkerSettings.load({"proxy": [args.proxy], "max_streams": 4096}, None)
    sys.exit(uvloop.run(worker.run(settings, PacedEngine(args.pace_s))))
